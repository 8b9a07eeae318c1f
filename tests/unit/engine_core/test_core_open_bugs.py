"""Defects that are known and open. Each test states what ought to hold.

They are strict: when a fix makes one pass, it fails until its mark is removed, and the test moves
to the file of its subject.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from core_kit import (
    BASE,
    SCOPE,
    admit,
    edit,
    fail_at,
    make_engine,
    make_model,
    prefill,
    random_tokens,
    register,
    run,
    snapshot,
)
from transformers import LlamaConfig, MistralConfig, SmolLM3Config

from leyline_engine.contract import Directive, EditPayload, LineageRun, Mode, Reason
from leyline_engine.replay.cache_manager import IntegrityError
from leyline_engine.replay.engine import PoolExhaustedError, ReplayEngine
from leyline_engine.replay.rotary_probe import read_model_facts

SOURCE = random_tokens(100, 3)
AMORTIZE = Directive(40, 45)
FORGET = Directive(60, 70, (), Mode.FORGET)


def open_bug(reason: str) -> pytest.MarkDecorator:
    """A strict expected failure."""
    return pytest.mark.xfail(strict=True, reason=reason)


def served_by_lineage(
    engine: ReplayEngine, prompt: list[int], lineage: tuple[LineageRun, ...]
) -> int:
    """Tokens that a request naming this lineage finds in the cache."""
    payload = EditPayload(session="s", scope=SCOPE, turn="probe", lineage=lineage)
    _, record = run(engine, [*prompt, 9], payload)
    return record.receipt.tokens.prefix


@open_bug("forget walks finished turns only")
def test_forget_reaches_what_a_running_turn_published() -> None:
    """A turn that still decodes has published its prompt; a forget must reach that too."""
    engine = make_engine()
    run(engine, SOURCE, register("t1"))
    prompt, payload = edit(SOURCE, [AMORTIZE], tail=[1, 2])
    running = admit(engine, prompt, payload)
    prefill(running)
    again, redact = edit(SOURCE, [AMORTIZE, FORGET], tail=[5], turn="t3")
    run(engine, again, redact)
    running.finish()
    assert served_by_lineage(engine, prompt, running.receipt.lineage) <= 40


@open_bug("an aborted turn's published KV is in no record")
def test_forget_reaches_an_aborted_turn() -> None:
    """A client that hangs up leaves KV in the tree; a later forget must find it."""
    engine = make_engine()
    run(engine, SOURCE, register("t1"))
    prompt, payload = edit(SOURCE, [AMORTIZE], tail=[1, 2])
    aborted = admit(engine, prompt, payload)
    prefill(aborted)
    aborted.abort()
    again, redact = edit(SOURCE, [AMORTIZE, FORGET], tail=[5], turn="t3")
    run(engine, again, redact)
    assert served_by_lineage(engine, prompt, aborted.receipt.lineage) <= 40


@pytest.mark.parametrize("turns", [1, 8])
@open_bug("a turn that falls out of the registry, or is replaced in it, keeps its KV")
def test_forget_reaches_turns_that_are_no_longer_retained(turns: int) -> None:
    """Retaining few turns bounds the sources, not what a forget has to erase."""
    engine = make_engine(pool=2000)
    run(engine, SOURCE, register("t1"))
    prompt, payload = edit(SOURCE, [AMORTIZE], tail=[1, 2])
    _, spliced = run(engine, prompt, payload)
    for number in range(turns):
        name = "t2" if turns == 1 else f"u{number}"
        latest = [*SOURCE, number + 1]
        run(engine, latest, register(name))
    again, redact = edit(latest, [FORGET], tail=[5], turn="t3", source_turn=name)
    _, record = run(engine, again, redact)
    assert record.receipt.reason is Reason.REPREFILLED
    assert served_by_lineage(engine, prompt, spliced.receipt.lineage) <= 40


@open_bug("a withheld request's own slots go back as they are")
def test_slots_of_a_withheld_request_are_overwritten() -> None:
    """What ran beside a forget read the span; its slots are blank before others get them."""
    engine = make_engine()
    run(engine, SOURCE, register("t1"))
    running = admit(engine, SOURCE + random_tokens(50, 7), register("t2"))
    running.prefill_step()
    own = running.owned.copy()
    prompt, payload = edit(SOURCE, [FORGET], tail=[5], turn="t3")
    sequence = admit(engine, prompt, payload)
    running.abort()
    freed = np.setdiff1d(own, sequence.owned)
    first, second = engine.cache.pool.read(0, freed)
    assert not first.any()
    assert not second.any()


@open_bug("each turn counts the shared path again")
def test_shared_slots_are_counted_once() -> None:
    """Two turns over one shared path retain its 20 slots, not 40."""
    engine = make_engine()
    run(engine, SOURCE, register("t1"))
    run(engine, [*SOURCE[:90], 1], register("t2"))
    run(engine, SOURCE[:80], register("t1", session="z"))
    prompt, payload = edit(SOURCE, [FORGET], tail=[9], turn="t3")
    _, record = run(engine, prompt, payload)
    assert "20 shared_retained" in record.receipt.detail


@open_bug("eviction isn't weighed before it is done")
def test_a_request_that_cannot_fit_evicts_nothing() -> None:
    """A waiting request is tried again and again; it must not empty the cache each time."""
    engine = make_engine()
    run(engine, SOURCE, register("t1"))
    running = admit(engine, random_tokens(300, 8))
    before = snapshot(engine)
    with pytest.raises(PoolExhaustedError):
        admit(engine, random_tokens(400, 9))
    assert snapshot(engine) == before
    running.abort()


@open_bug("a failure behind admission leaks the slots and the lock")
def test_working_cache_that_cannot_be_filled() -> None:
    """Running out of memory for the working cache leaves nothing behind."""
    engine = make_engine()
    run(engine, SOURCE, register("t1"))
    before = snapshot(engine)
    pool = engine.cache.pool
    pool.read = fail_at(pool.read, 1, MemoryError("x"))  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        admit(engine, [*SOURCE, 1])
    assert snapshot(engine) == before
    engine.check_integrity()


@open_bug("a failing erase leaks detached slots and the admission")
def test_erase_that_fails() -> None:
    """An erase that fails may fail the request, but loses no slot."""
    engine = make_engine()
    run(engine, SOURCE, register("t1"))
    prompt, payload = edit(SOURCE, [FORGET], tail=[9])
    pool = engine.cache.pool
    pool.erase = fail_at(pool.erase, 1, RuntimeError("x"))  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="x"):
        admit(engine, prompt, payload)
    engine.check_integrity()


@open_bug("finish before the prompt is computed gives the tree's slots away")
def test_finish_before_the_prompt_is_done() -> None:
    """Ending early publishes nothing and keeps the accounts right."""
    engine = make_engine()
    run(engine, SOURCE, register("t1"))
    admit(engine, [*SOURCE, 1, 2], register("t2")).finish()
    engine.check_integrity()


@open_bug("finish publishes before it looks whether the sequence has ended")
def test_second_ending_changes_nothing() -> None:
    """Ending twice is an error that leaves the cache alone."""
    engine = make_engine()
    sequence = admit(engine, SOURCE, register("t1"))
    sequence.decode_step(int(prefill(sequence).argmax()))
    sequence.abort()
    before = snapshot(engine)
    with pytest.raises(RuntimeError, match="ends once"):
        sequence.finish()
    assert snapshot(engine) == before
    engine.check_integrity()


@pytest.mark.parametrize("damage", ["locks", "detached"])
@open_bug("only the root's lock count is compared")
def test_integrity_check_counts_the_locks_of_every_node(damage: str) -> None:
    """A stray lock deep in the tree keeps its slots for ever; the check ought to see it."""
    engine = make_engine()
    run(engine, SOURCE, register("t1"))
    node = next(iter(engine.cache.tree.nodes()))
    if damage == "locks":
        node.locks += 1
    else:
        node.detached = True
    with pytest.raises(IntegrityError):
        engine.check_integrity()


@open_bug("lineage runs are checked only when there is an edit")
def test_unsorted_lineage_without_an_edit() -> None:
    """A malformed lineage map is refused by name whether or not the turn was edited."""
    engine = make_engine()
    run(engine, SOURCE, register("t1"))
    runs = (LineageRun(50, "a"), LineageRun(20, "b"))
    payload = EditPayload(session="s", scope=SCOPE, turn="t2", lineage=runs)
    _, record = run(engine, [*SOURCE, 1], payload)
    assert record.receipt.reason is Reason.INVALID_EDIT


@open_bug("a lineage name that isn't UTF-8 raises out of admission")
def test_lineage_name_that_is_no_text() -> None:
    """A lone surrogate, which JSON can carry, doesn't fail the request."""
    engine = make_engine()
    payload = EditPayload(session="s", scope=SCOPE, turn="t1", lineage=(LineageRun(50, "\ud800"),))
    run(engine, SOURCE, payload)


@pytest.mark.parametrize(
    "config",
    [
        SmolLM3Config(**BASE, num_key_value_heads=1, no_rope_layer_interval=2),
        MistralConfig(**BASE, num_key_value_heads=1, sliding_window=16),
    ],
    ids=["layers-without-rotary", "sliding-window-without-layer-types"],
)
@open_bug("only layer 0 is probed, and only layer_types tells of windows")
def test_models_outside_the_allow_list(config: Any) -> None:
    """Layers that don't turn, and windows, must switch splicing off."""
    assert read_model_facts(make_model(config)).unsupported


@open_bug("the tolerance is looked up before the dtype is refused")
def test_dtype_outside_the_list_is_refused() -> None:
    """fp64 KV is refused by name rather than failing the start."""
    model = make_model(LlamaConfig(**BASE, num_key_value_heads=1)).to(torch.float64)
    assert "float64" in read_model_facts(model).unsupported
