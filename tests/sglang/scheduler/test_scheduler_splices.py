"""Splices in SGLang's queue: which tokens are copied, and what gives way when memory is short."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scheduler_kit import CAPABILITY, Scheduler, sealed, source_of, text
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from leyline_engine.contract import (
    ATTENTION_SINK,
    Directive,
    EditPayload,
    Outcome,
    ProfileError,
    Recompute,
    SourceRef,
    apply_directives,
)
from leyline_engine.settings import PROFILE_VARIABLE, recompute_from

pytestmark = pytest.mark.usefixtures("server_args")


def editing(scheduler: Scheduler, cut: Directive, **fields: Any) -> tuple[list[int], EditPayload]:
    """The prompt and payload of an edit of a turn of 120 tokens, which has run."""
    told, _ = scheduler.serve(text(120, 1), EditPayload(session="s", scope="t", turn="t1"))
    payload = EditPayload(
        session="s",
        scope="t",
        turn="t2",
        sources=(SourceRef("t1", len(source_of(told)), sealed(told)),),
        directives=(cut,),
        **fields,
    )
    return [*apply_directives(source_of(told), [cut]), 9, 8], payload


@pytest.mark.parametrize("sink", [0, ATTENTION_SINK - 1, ATTENTION_SINK, ATTENTION_SINK + 16])
def test_a_sink_may_be_raised_and_never_lowered(sink: int) -> None:
    """Positions below the engine's own sink are prefilled, whatever the payload asks for."""
    scheduler = Scheduler()
    prompt, payload = editing(scheduler, Directive(5, 8), sink=sink)
    _, record = scheduler.serve(prompt, payload)
    assert record is not None
    receipt = record.receipt
    first = max(sink, ATTENTION_SINK)
    assert receipt.outcome is Outcome.SPLICED
    assert receipt.tokens.prefix == 5
    assert [run.start for run in receipt.lineage] == [first]
    assert receipt.tokens.spliced == 121 - 3 - first
    scheduler.check_idle()


def test_an_engines_profile_holds_whatever_a_payload_copies() -> None:
    """The boundary is prefilled with the replacement, and nobody asked for it."""
    scheduler = Scheduler(recompute=Recompute(7))
    prompt, payload = editing(scheduler, Directive(40, 50, (3, 4, 5)))
    _, record = scheduler.serve(prompt, payload)
    assert record is not None
    receipt = record.receipt
    assert receipt.outcome is Outcome.SPLICED
    assert receipt.tokens.spliced == 121 - 50 - 7
    scheduler.check_idle()


def test_the_profile_is_read_from_the_environment(tmp_path: Path) -> None:
    """By the model's name or fingerprint; without its model in the file, no engine starts."""
    path = tmp_path / "profiles.json"
    path.write_text(json.dumps({"profiles": [{"model": CAPABILITY.model, "boundary": 7}]}))
    assert recompute_from(CAPABILITY, {PROFILE_VARIABLE: str(path)}) == Recompute(7)
    assert recompute_from(CAPABILITY, {}) == Recompute()
    path.write_text('{"profiles": [{"model": "another"}]}')
    with pytest.raises(ProfileError, match="has no profile for"):
        recompute_from(CAPABILITY, {PROFILE_VARIABLE: str(path)})


def test_what_a_waiting_splice_holds_gives_way_when_memory_is_short() -> None:
    """An eviction gets what it asks for, and the request still runs to its end."""
    scheduler = Scheduler(300)
    prompt, payload = editing(scheduler, Directive(40, 50, (3, 4, 5)))
    req = scheduler.submit(prompt, payload, message_id="edit")
    # Admitted in the round that computes the gap, it leaves the copy too little room.
    other = scheduler.submit(text(60, 2), decode=60)
    scheduler.step()
    scheduler.step()
    assert not other.finished()
    held = scheduler.cache.protected_size() - 60
    assert held > 100, "control: the splice holds its source"
    assert scheduler.cache.evictable_size() == 0
    evicted = scheduler.cache.evict(EvictParams(num_tokens=20)).num_tokens_evicted
    assert evicted >= 20
    scheduler.drain()
    assert len(req.output_ids) == 2
    assert len(other.output_ids) == 60
    tokens = scheduler.sender.records["edit"].receipt.tokens
    assert tokens.prompt == tokens.prefix + tokens.spliced + tokens.prefilled == len(prompt)
    scheduler.check_idle()
