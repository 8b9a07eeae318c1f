"""The KV that a forget reaches in SGLang's tree, however the turn that brought it came along."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from scheduler_kit import VOCABULARY, Scheduler, sealed, source_of, text
from secret_kit import HEAD, REDACTED, SECRET, SPANS, TAIL, TOLD, forgetting, telling

from leyline_engine.admit.packed_hints import MAX_ENVELOPE_BYTES
from leyline_engine.contract import (
    Directive,
    EditPayload,
    ForgetCounts,
    Mode,
    Outcome,
    Reason,
    SourceRef,
    SpanLabel,
    edit_envelope,
    token_array,
)
from leyline_engine.records.publications import Publication, Space

pytestmark = pytest.mark.usefixtures("server_args")


def readers(scheduler: Scheduler) -> int:
    """The number of cached slots that have read the secret."""
    cached = scheduler.cache.all_values_flatten()
    return sum(SECRET in scheduler.has_read[nonce] for _, _, nonce in scheduler.read(cached))


def held(scheduler: Scheduler) -> int:
    """The number of slots that hold something that has read the secret, free ones included."""
    every = torch.arange(1, scheduler.capacity + 1)
    return sum(SECRET in scheduler.has_read[nonce] for _, _, nonce in scheduler.read(every))


def several_answers(
    scheduler: Scheduler, prompt: list[int], payload: EditPayload, message: str, answers: int = 2
) -> None:
    """SGLang's version of ``n``: a request without an answer, and then one for each answer."""
    for decode in (0, *range(2, answers + 2)):
        scheduler.submit(prompt, payload, message_id=message, answers=answers, decode=decode)
        if not decode:
            scheduler.drain()
    scheduler.drain()


def test_a_prompt_with_several_answers_is_found_by_a_later_forget() -> None:
    """The KV that one message's ``n`` requests published is noted for their session."""
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
    assert held(scheduler) == 0


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
    assert held(scheduler) == 0
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
    assert held(scheduler) == 0


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
    assert held(scheduler) == 0


FORGETS: dict[str, dict[str, object]] = {
    **WRONG,
    "the names": {"forget": ["secret", ""]},
    "too many names": {"forget": ["secret"] * 5000},
    "what a directive forgets": {"forget": [], "directives": [{"start": 1, "mode": "forget"}]},
    "whether a directive forgets": {"forget": [], "directives": [5]},
}


@pytest.mark.parametrize("name", FORGETS)
def test_a_spoilt_edit_forgets_all_the_same(name: str) -> None:
    """The unreadable part of a demand costs prefills, and leaves nothing."""
    scheduler = Scheduler()
    scheduler.serve(TOLD, telling())
    scheduler.submit(REDACTED, hints=spoilt(forgetting(), **FORGETS[name]))
    scheduler.drain()
    forgot = scheduler.sender.records["spoilt"].receipt.forgot
    assert forgot is not None
    assert forgot.overwritten > TAIL
    assert held(scheduler) == 0


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
    assert held(scheduler) == 0
    assert scheduler.allocator.available_size() == scheduler.capacity
    foreign = {"protocol_version": "0.1", "message_id": "m", "actions": []}
    scheduler.submit(TOLD, hints=foreign)
    scheduler.drain()
    assert readers(scheduler) > TAIL, "control: without an edit it is a request like any"


STRANGER = [*TOLD, *text(15, 6)]
"""The continuation, by a client without a session, of the prompt that holds the secret."""


@pytest.mark.parametrize("first", [False, True])
def test_what_a_stranger_went_on_with_is_forgotten_too(first: bool) -> None:
    """KV of requests without a session keeps nothing of a session's, whichever came first."""
    scheduler = Scheduler()
    if first:
        scheduler.serve(STRANGER)
    scheduler.serve(TOLD, telling())
    if not first:
        scheduler.serve(STRANGER)
    before = readers(scheduler)
    assert before > TAIL + 15
    _, record = scheduler.serve(REDACTED, forgetting())
    assert record is not None
    assert record.receipt.forgot == ForgetCounts(overwritten=before)
    assert held(scheduler) == 0
    scheduler.check_idle()


def test_a_forget_waits_for_a_stranger_that_runs() -> None:
    """Its KV can't be found from then on, and its later KV goes with it."""
    scheduler = Scheduler()
    scheduler.serve(TOLD, telling())
    stranger = scheduler.submit(STRANGER, decode=12)
    scheduler.step()
    scheduler.submit(REDACTED, forgetting(), message_id="forget")
    for _ in range(5):
        scheduler.step()
    assert not stranger.finished()
    assert scheduler.sender.records["forget"].receipt.forgot.pending > TAIL
    again, _ = scheduler.serve(STRANGER[:-1], telling(session="other"), decode=1)
    assert again.prefix_len == HEAD
    assert scheduler.sender.forgotten["forget"].pending == 0
    assert held(scheduler) == 0
    scheduler.check_idle()


def test_another_session_keeps_what_it_published_itself() -> None:
    """A forget takes nothing that another session sent, and all of a stranger's KV after that."""
    scheduler = Scheduler()
    scheduler.serve(TOLD, telling())
    shared = TOLD[: HEAD + 20]
    scheduler.serve(shared, telling(session="other", spans=()), decode=1)
    scheduler.serve(STRANGER)
    _, record = scheduler.serve(REDACTED, forgetting())
    assert record is not None
    assert record.receipt.forgot is not None
    assert record.receipt.forgot.shared_retained == 20
    assert readers(scheduler) == 20
    found = scheduler.cache.find(token_array(STRANGER), Space()).device_prefix_len
    assert found == len(shared)
    scheduler.check_idle()


def test_a_forget_is_pending_while_nobody_known_holds_what_is_left() -> None:
    """A stranger that isn't noted is found by no forget, which ends when it is evicted."""
    scheduler = Scheduler(500)
    scheduler.serve(TOLD, telling())
    scheduler.serve(STRANGER)
    known = scheduler.engine.publications
    for owner, path in known.strangers(Publication(token_array(STRANGER)), HEAD):
        known.cut(owner, path, 0)
    scheduler.submit(REDACTED, forgetting(), message_id="forget")
    scheduler.drain()
    forgot = scheduler.sender.records["forget"].receipt.forgot
    assert forgot is not None
    assert forgot.pending > TAIL
    found = scheduler.cache.find(token_array(STRANGER), Space()).device_prefix_len
    assert found == HEAD
    scheduler.serve(text(480, 9))
    scheduler.serve(text(480, 10))
    assert scheduler.sender.forgotten["forget"].pending == 0
    assert held(scheduler) == 0
    scheduler.check_idle()


def test_a_thousand_small_sessions_leave_a_large_one_its_cache() -> None:
    """A session's published KV stays cached while the pool has room, however many others begin."""
    scheduler = Scheduler(2000)
    large = text(1500, 11)
    scheduler.serve(large, telling(spans=()))
    for number in range(1100):
        small = Publication(array("q", [number % VOCABULARY, number // VOCABULARY, 3]))
        scheduler.engine.publisher.publish(("u", f"s{number}"), small)
    found = scheduler.cache.find(token_array(large), Space()).device_prefix_len
    assert found == len(large)


def send_twice(scheduler: Scheduler) -> None:
    """Both are computed; of what the second one adds, the tree keeps nothing."""
    for turn in ("t1", "t2"):
        scheduler.submit(TOLD, telling(turn=turn))
    scheduler.drain()


def evict(scheduler: Scheduler) -> None:
    """The turn's KV makes room for somebody else's."""
    scheduler.serve(TOLD, telling())
    scheduler.serve(text(scheduler.capacity - 60, 12))


def retract(scheduler: Scheduler) -> None:
    """Memory is short: what was written is computed again."""
    scheduler.submit(TOLD, telling(), decode=20)
    for _ in range(5):
        scheduler.step()
    (running,) = scheduler.running
    scheduler.retract(running)
    scheduler.serve(text(scheduler.capacity - 60, 13))
    scheduler.drain()


def flush(scheduler: Scheduler) -> None:
    """The whole cache is emptied."""
    scheduler.serve(TOLD, telling())
    scheduler.flush()


@pytest.mark.parametrize(
    "leave",
    [send_twice, evict, retract, flush],
    ids=lambda leave: leave.__name__,
)
def test_free_slots_hold_nothing_that_was_forgotten(leave: Callable[[Scheduler], None]) -> None:
    """Slots that SGLang frees without notice are overwritten with the next forget."""
    scheduler = Scheduler(600)
    leave(scheduler)
    assert held(scheduler) > readers(scheduler), "control: something is left in free slots"
    scheduler.serve(REDACTED, forgetting())
    assert held(scheduler) == 0


def test_slots_of_a_turn_that_a_forget_withheld_are_overwritten_as_it_ends() -> None:
    """A request that runs while its session forgets leaves nothing, and nothing else is touched."""
    scheduler = Scheduler()
    other, _ = scheduler.serve(text(30, 14))
    slots = scheduler.cache.find(other.origin_input_ids, Space()).last_device_node
    before = scheduler.read(scheduler.cache.path_device_indices(slots))
    running = scheduler.submit(TOLD, telling(), decode=12)
    scheduler.step()
    forget = scheduler.submit(REDACTED, forgetting(), decode=1, message_id="forget")
    scheduler.step()
    assert forget.finished()
    assert not running.finished()
    pending = scheduler.sender.records["forget"].receipt.forgot.pending
    assert held(scheduler) >= pending > TAIL
    scheduler.drain()
    assert held(scheduler) == 0
    assert scheduler.sender.forgotten["forget"].pending == 0
    assert scheduler.read(scheduler.cache.path_device_indices(slots)) == before
    clean = scheduler.cache.find(token_array(REDACTED), Space()).device_prefix_len
    assert clean == len(REDACTED), "the new turn's KV stays, and what both have in front"


def test_a_stranger_that_hangs_up_after_a_forget_leaves_nothing() -> None:
    """Its own KV goes when it lets go of the session's KV that it held."""
    scheduler = Scheduler()
    scheduler.serve(TOLD, telling())
    stranger = scheduler.submit(STRANGER, decode=20)
    for _ in range(4):
        scheduler.step()
    scheduler.submit(TOLD[: HEAD - 9], forgetting(spans=()), decode=1)
    scheduler.step()
    assert not stranger.finished()
    assert held(scheduler) > TAIL
    scheduler.abort(stranger)
    scheduler.drain()
    assert held(scheduler) == 0
    scheduler.check_idle()
