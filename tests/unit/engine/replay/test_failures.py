"""Failures injected at every stage leave no slot, lock or record."""

from __future__ import annotations

from typing import Any

import pytest
from support.replay_engine import (
    admit,
    edit,
    fail_at,
    make_engine,
    prefill,
    random_tokens,
    reference,
    register,
    run,
    same_logits,
    snapshot,
)

from leyline_engine.contract import Directive, EditPayload, Outcome, Reason, Receipt
from leyline_replay import admission
from leyline_replay.cache.slots import PoolExhaustedError
from leyline_replay.engine import PromptTooLongError, ReplayEngine

SOURCE = random_tokens(120, 2)
PROMPT, PAYLOAD = edit(
    SOURCE, [Directive(40, 50, (3,)), Directive(70, 75), Directive(90, 99, (4, 4))], tail=[5, 6]
)


def prepared(**options: Any) -> ReplayEngine:
    """An engine that holds the source."""
    engine = make_engine(**options)
    run(engine, SOURCE, register("t1"))
    return engine


def serve(engine: ReplayEngine, before: object) -> Receipt:
    """Admit and abort, which must leave everything as before; then serve for good."""
    sequence = admit(engine, PROMPT, PAYLOAD)
    engine.check_integrity()
    receipt = sequence.receipt
    sequence.abort()
    engine.check_integrity()
    assert snapshot(engine) == before
    return receipt


@pytest.mark.parametrize("call", [1, 2, 3])
@pytest.mark.parametrize("error", [RuntimeError("x"), MemoryError("x"), ValueError("x")])
def test_copy_fails(call: int, error: Exception) -> None:
    """A copy that fails, first or last, turns the request into an ordinary prefill."""
    engine = prepared()
    before = snapshot(engine)
    copy = engine.cache.pool.copy
    engine.cache.pool.copy = fail_at(copy, call, error)  # type: ignore[method-assign]
    receipt = serve(engine, before)
    assert (receipt.outcome, receipt.reason) == (Outcome.REPREFILLED, Reason.TRANSFORM_FAILED)
    assert receipt.lineage == ()
    assert receipt.tokens.prefix == 40
    engine.cache.pool.copy = fail_at(copy, call, error)  # type: ignore[method-assign]
    logits, record = run(engine, PROMPT, PAYLOAD)
    assert record.receipt.reason is Reason.TRANSFORM_FAILED
    assert same_logits(logits, reference(PROMPT))


@pytest.mark.parametrize("name", ["plan_turn", "extend_lineage", "runs_before"])
def test_a_step_of_the_splice_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning, naming and joining fail as harmlessly as copying."""
    engine = prepared()
    before = snapshot(engine)
    broken = fail_at(getattr(admission, name), 1, RuntimeError("x"))
    monkeypatch.setattr(admission, name, broken)
    assert serve(engine, before).reason is Reason.TRANSFORM_FAILED
    monkeypatch.undo()
    assert admit(engine, PROMPT, PAYLOAD).receipt.reason is Reason.SPLICED


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("x"), Reason.TRANSFORM_FAILED),
        (PoolExhaustedError("x"), None),
    ],
)
def test_first_allocation_fails(error: Exception, reason: Reason | None) -> None:
    """Without room for the splice the request runs without it, and names a reason."""
    engine = prepared()
    before = snapshot(engine)
    engine.cache.allocate = fail_at(engine.cache.allocate, 1, error)  # type: ignore[method-assign]
    receipt = serve(engine, before)
    assert receipt.outcome is Outcome.REPREFILLED
    assert receipt.reason is not None
    assert reason in (None, receipt.reason)


@pytest.mark.parametrize("error", [RuntimeError("x"), PoolExhaustedError("x")])
def test_every_allocation_fails(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error reaches the caller, and nothing was taken."""
    engine = prepared()
    before = snapshot(engine)

    def allocate(count: int, request: str) -> Any:
        raise error

    monkeypatch.setattr(engine.cache, "allocate", allocate)
    for payload in (PAYLOAD, register("t2"), None):
        with pytest.raises(type(error)):
            admit(engine, PROMPT, payload)
        engine.check_integrity()
        assert snapshot(engine) == before
    monkeypatch.undo()
    assert admit(engine, PROMPT, PAYLOAD).receipt.reason is Reason.SPLICED


def test_forward_fails_in_the_middle() -> None:
    """A request whose second chunk fails can be aborted; its KV is nowhere."""
    engine = prepared()
    before = snapshot(engine)
    sequence = admit(engine, PROMPT + SOURCE, register("t2"))
    sequence.prefill_step()
    sequence.forward = fail_at(sequence.forward, 1, RuntimeError("x"))
    with pytest.raises(RuntimeError, match="x"):
        sequence.prefill_step()
    sequence.abort()
    engine.check_integrity()
    assert snapshot(engine) == before


def test_pool_write_fails_in_decode() -> None:
    """A decode step that fails leaves a sequence that can still be finished."""
    engine = prepared()
    sequence = admit(engine, PROMPT, PAYLOAD)
    logits = prefill(sequence)
    write = engine.cache.pool.write
    engine.cache.pool.write = fail_at(write, 1, RuntimeError("x"))  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="x"):
        sequence.decode_step(int(logits.argmax()))
    engine.check_integrity()
    sequence.finish(int(logits.argmax()))
    engine.check_integrity()
    assert engine.stats().in_flight == 0


@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("payload", [None, PAYLOAD], ids=["prefix only", "splice"])
def test_working_cache_that_cannot_be_filled(payload: EditPayload | None, call: int) -> None:
    """A start that fails after admission gives back the slots, the prefix and the copies."""
    engine = prepared()
    before = snapshot(engine)
    pool = engine.cache.pool
    read = pool.read
    pool.read = fail_at(read, call, MemoryError("x"))  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        admit(engine, PROMPT, payload)
    assert snapshot(engine) == before
    engine.check_integrity()
    assert engine.stats().in_flight == 0
    pool.read = read  # type: ignore[method-assign]
    logits, _ = run(engine, PROMPT)
    assert same_logits(logits, reference(PROMPT))


def test_finish_before_the_prompt_is_done() -> None:
    """Ending early publishes nothing and keeps the accounts right."""
    engine = prepared()
    cached_before = engine.stats().cached
    running = admit(engine, [*SOURCE, *SOURCE], register("t2"))
    running.prefill_step()
    running.finish()
    engine.check_integrity()
    assert engine.stats().cached == cached_before
    assert engine.stats().in_flight == 0


def test_second_ending_changes_nothing() -> None:
    """Ending twice is an error that leaves the cache alone."""
    engine = make_engine()
    sequence = admit(engine, SOURCE, register("t1"))
    sequence.decode_step(int(prefill(sequence).argmax()))
    sequence.abort()
    before = snapshot(engine)
    for ending in (sequence.finish, sequence.abort):
        with pytest.raises(RuntimeError, match="ends once"):
            ending()
    assert snapshot(engine) == before
    engine.check_integrity()


def test_no_room_beside_the_source() -> None:
    """A pool that can't hold source and copy serves by prefill; the source may be evicted."""
    engine = prepared(pool=170)
    logits, record = run(engine, PROMPT, PAYLOAD)
    assert record.receipt.outcome is Outcome.REPREFILLED
    assert record.receipt.reason is not None
    assert same_logits(logits, reference(PROMPT))


def test_want_of_room_is_said() -> None:
    """A splice that found its source but no slots says what was wanting."""
    engine = prepared(pool=170)
    receipt = admit(engine, PROMPT, PAYLOAD).receipt
    assert receipt.reason is Reason.SOURCE_EVICTED
    assert "slots" in receipt.detail


def test_decode_without_room() -> None:
    """A decode step without a free slot raises and takes nothing; finishing still works."""
    engine = make_engine(pool=128)
    other = admit(engine, SOURCE[:60], room=1)
    prefill(other)
    sequence = admit(engine, [9, *SOURCE[:66]], room=60)
    logits = prefill(sequence)
    sequence.decode_step(int(logits.argmax()))
    before = snapshot(engine)
    with pytest.raises(PoolExhaustedError):
        sequence.decode_step(3)
    assert snapshot(engine) == before
    engine.check_integrity()
    sequence.finish()
    other.abort()
    engine.check_integrity()
    assert engine.stats().in_flight == 0


@pytest.mark.parametrize(("tokens", "room"), [([], 1), ([1] * 4096, 1), ([1] * 599, 2)])
def test_prompt_that_never_fits(tokens: list[int], room: int) -> None:
    """An empty or hopeless prompt is the caller's fault and says so at once."""
    engine = prepared()
    before = snapshot(engine)
    with pytest.raises(PromptTooLongError):
        admit(engine, tokens, PAYLOAD, room=room)
    assert snapshot(engine) == before
