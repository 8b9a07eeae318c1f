"""Which KV a forget reaches in SGLang's tree, however the turn that brought it came along."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from conftest import ModelFolder
from scheduler_kit import SECRETS, VOCABULARY, Scheduler, install_server_args, sealed, source_of
from sglang_models import SglangModel

from leyline_engine.contract import (
    Directive,
    EditPayload,
    Mode,
    Outcome,
    Reason,
    SourceRef,
    SpanLabel,
    edit_envelope,
    token_array,
)
from leyline_engine.sglang.hints import MAX_ENVELOPE_BYTES
from leyline_engine.sglang.publications import Space

SECRET = SECRETS + 3
HEAD, TAIL = 60, 50


@pytest.fixture(scope="module", autouse=True)
def server_args(model_folder: ModelFolder) -> None:
    """SGLang's configuration, once per process."""
    install_server_args(Path(model_folder(SglangModel.MLA)))


def text(length: int, seed: int) -> list[int]:
    """Random tokens."""
    rng = Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(length)]


TOLD = [*text(HEAD, 1), SECRET, *text(TAIL, 2)]
SPANS = (
    SpanLabel("head", 0, HEAD),
    SpanLabel("secret", HEAD, HEAD + 1),
    SpanLabel("tail", HEAD + 1, len(TOLD)),
)
REDACTED = [*TOLD[:HEAD], 7, *TOLD[HEAD + 1 :]]


def telling(**changes: Any) -> EditPayload:
    """The turn that reads the secret."""
    payload = EditPayload(session="s", scope="t", turn="t1", spans=SPANS)
    return msgspec.structs.replace(payload, **changes)


def forgetting(**changes: Any) -> EditPayload:
    """The turn that demands its forgetting."""
    return telling(turn="t2", forget=("secret",), **changes)


def readers(scheduler: Scheduler) -> int:
    """How many cached slots have read the secret."""
    cached = scheduler.cache.all_values_flatten()
    return sum(SECRET in scheduler.has_read[nonce] for _, _, nonce in scheduler.read(cached))


def several_answers(
    scheduler: Scheduler, prompt: list[int], payload: EditPayload, message: str, answers: int = 2
) -> None:
    """What SGLang makes of ``n``: a request without an answer, and then one for each answer."""
    for decode in (0, *range(2, answers + 2)):
        scheduler.submit(prompt, payload, message_id=message, answers=answers, decode=decode)
        if not decode:
            scheduler.drain()
    scheduler.drain()


def test_a_prompt_with_several_answers_is_found_by_a_later_forget() -> None:
    """What ``n`` requests of one message published is noted for their session."""
    scheduler = Scheduler()
    several_answers(scheduler, TOLD, telling(), "told")
    assert readers(scheduler) > TAIL
    assert scheduler.sender.records["told"].receipt.outcome is Outcome.UNEDITED
    assert scheduler.sender.records["told"].receipt.session == "s"
    assert scheduler.engine.registry.count() == 0, "none of the answers is the turn"
    _, record = scheduler.serve(REDACTED, forgetting())
    assert record is not None
    assert record.receipt.forgot is not None
    assert record.receipt.forgot.overwritten > TAIL
    assert readers(scheduler) == 0


def test_a_forget_that_comes_with_several_answers_is_counted_once() -> None:
    """Its requests add up to what was reached; what they compute is kept, and so are turns that
    never read the span."""
    scheduler = Scheduler()
    clean = [*TOLD[:HEAD], *text(20, 4)]
    labels = (SPANS[0], SpanLabel("other", HEAD, len(clean)))
    scheduler.serve(clean, telling(turn="t0", spans=labels))
    told, _ = scheduler.serve(TOLD, telling())
    branch = scheduler.submit([*TOLD, 5], telling(turn="b"), decode=20)
    scheduler.step()
    assert not branch.finished()
    sources = (SourceRef("t1", len(source_of(told)), sealed(told)),)
    directives = (Directive(HEAD, HEAD + 1, (7,)),)
    demand = forgetting(sources=sources, directives=directives)
    several_answers(scheduler, REDACTED, demand, "forget")
    assert scheduler.sender.records["forget"].receipt.reason is Reason.UNSUPPORTED_RUNTIME
    forgot = scheduler.sender.forgotten["forget"]
    assert forgot.pending == 0
    assert forgot.overwritten == scheduler.seen.overwritten > TAIL + 20
    assert readers(scheduler) == 0
    for kept in (REDACTED, clean):
        cached = scheduler.cache.find(token_array(kept), Space())
        assert cached.device_prefix_len == len(kept)
    cached_tokens = scheduler.cache.all_values_flatten().numel()
    assert cached_tokens > len(REDACTED) + 20 + 1, "an answer was withheld"


def test_edits_of_several_answers_are_refused_and_their_forgets_are_not() -> None:
    """A directive of a prompt with several answers isn't spliced; one that forgets is obeyed."""
    scheduler = Scheduler()
    told, _ = scheduler.serve(TOLD, telling())
    source = SourceRef("t1", len(source_of(told)), sealed(told))
    payload = telling(
        turn="t2", spans=(), sources=(source,), directives=(Directive(HEAD, HEAD + 1, (7,)),)
    )
    prompt = [*REDACTED, *source_of(told)[len(TOLD) :]]
    several_answers(scheduler, prompt, payload, "cut")
    receipt = scheduler.sender.records["cut"].receipt
    assert (receipt.outcome, receipt.reason) == (Outcome.REPREFILLED, Reason.UNSUPPORTED_RUNTIME)
    assert receipt.tokens.spliced == 0
    assert readers(scheduler) > TAIL
    (cut,) = payload.directives
    erase = msgspec.structs.replace(cut, mode=Mode.FORGET)
    erasing = msgspec.structs.replace(payload, directives=(erase,))
    several_answers(scheduler, prompt, erasing, "erase")
    assert readers(scheduler) == 0


def spoilt(payload: EditPayload, **wrong: object) -> dict[str, Any]:
    """An envelope whose payload can't be read as a whole."""
    raw: dict[str, Any] = msgspec.to_builtins(edit_envelope("spoilt", payload))
    raw["actions"][0]["payload"] |= wrong
    return raw


WRONG: dict[str, dict[str, object]] = {
    "directives": {"directives": "all"},
    "a directive": {"directives": [{"start": 1, "end": "2"}]},
    "sources": {"sources": 5},
    "segments": {"segments": [{"kind": "move"}]},
    "the turn's name": {"turn": ""},
    "the lineage": {"lineage": [[-1, "l"]]},
    "spans": {"spans": [["secret", "x", 9]]},
    "the sink": {"sink": -1},
    "the scope shared with": {"share": 7},
}
"""Members of a payload that can't be read."""


@pytest.mark.parametrize("name", WRONG)
def test_what_a_spoilt_edit_published_is_found_by_a_later_forget(name: str) -> None:
    """Only the edit is refused: whose the prompt is still holds."""
    scheduler = Scheduler()
    scheduler.submit(TOLD, hints=spoilt(telling(), **WRONG[name]))
    scheduler.drain()
    receipt = scheduler.sender.records["spoilt"].receipt
    assert (receipt.outcome, receipt.session) == (Outcome.REPREFILLED, "s")
    assert receipt.reason in {Reason.INVALID_EDIT, Reason.INVALID_DIRECTIVE}
    assert receipt.turn == ("" if "turn" in WRONG[name] else "t1")
    assert readers(scheduler) > TAIL
    scheduler.serve(REDACTED, forgetting())
    assert readers(scheduler) == 0


FORGETS: dict[str, dict[str, object]] = {
    **WRONG,
    "the names": {"forget": ["secret", ""]},
    "too many names": {"forget": ["secret"] * 5000},
    "what a directive forgets": {"forget": [], "directives": [{"start": 1, "mode": "forget"}]},
    "whether a directive forgets": {"forget": [], "directives": [5]},
}


@pytest.mark.parametrize("name", FORGETS)
def test_a_spoilt_edit_forgets_all_the_same(name: str) -> None:
    """What can't be read of a demand costs prefills, and leaves nothing."""
    scheduler = Scheduler()
    scheduler.serve(TOLD, telling())
    scheduler.submit(REDACTED, hints=spoilt(forgetting(), **FORGETS[name]))
    scheduler.drain()
    forgot = scheduler.sender.records["spoilt"].receipt.forgot
    assert forgot is not None
    assert forgot.overwritten > TAIL
    assert readers(scheduler) == 0


def _of_version(payload: EditPayload, version: str) -> dict[str, Any]:
    raw = spoilt(payload)
    raw["actions"][0]["action_version"] = version
    return raw


def _twice(payload: EditPayload) -> dict[str, Any]:
    raw = spoilt(payload)
    return raw | {"actions": raw["actions"] * 2}


NAMELESS: dict[str, Callable[[EditPayload], object]] = {
    "session": lambda payload: spoilt(payload, session=None),
    "scope": lambda payload: spoilt(payload, scope=""),
    "version": lambda payload: _of_version(payload, "2.0"),
    "two edits": _twice,
    "message": lambda payload: spoilt(payload) | {"message_id": ""},
    "actions": lambda payload: spoilt(payload) | {"actions": 5},
    "size": lambda payload: spoilt(payload, share="x" * MAX_ENVELOPE_BYTES),
}
"""Envelopes with an edit that don't say whose it is."""


@pytest.mark.parametrize("name", NAMELESS)
def test_what_no_forget_could_find_is_not_kept(name: str) -> None:
    """A prompt whose envelope doesn't say whose it is runs, and its KV is gone with it."""
    scheduler = Scheduler()
    req = scheduler.submit(TOLD, hints=NAMELESS[name](telling()))
    scheduler.drain()
    assert len(req.output_ids) == 2
    assert readers(scheduler) == 0
    assert scheduler.allocator.available_size() == scheduler.capacity
    foreign = {"protocol_version": "0.1", "message_id": "m", "actions": []}
    scheduler.submit(TOLD, hints=foreign)
    scheduler.drain()
    assert readers(scheduler) > TAIL, "control: without an edit it is a request like any"
