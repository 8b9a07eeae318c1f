"""After any failure, at any time, tree, pool and registry are as they were.

For each stage of a request every single call is made to fail in turn: the first match, the second
lock, the copy of the third segment, the rotation in the second layer. What is left is compared in
full: keys, slots, owners and locks of the tree, the stored bytes of each slot, the free slots, the
registry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import msgspec
import pytest
import torch
from support.replay_engine import (
    admit,
    contents,
    edit,
    fail_at,
    held,
    make_engine,
    prefill,
    random_tokens,
    register,
    run,
    snapshot,
)

from leyline_engine.admit import rules
from leyline_engine.contract import (
    CopySegment,
    Directive,
    LiteralSegment,
    Outcome,
    Reason,
    SourceRef,
    token_digest,
)
from leyline_engine.records import retention
from leyline_replay import admission, receipts, sequence
from leyline_replay import engine as engine_module
from leyline_replay.cache.working import WorkingCache
from leyline_replay.engine import ReplayEngine
from leyline_replay.sequence import Sequence as Running

FIRST, SECOND = random_tokens(120, 2), random_tokens(100, 3)
_, SINGLE = edit(FIRST, [Directive(40, 50, (3,)), Directive(70, 75)])
PROMPT = [*FIRST[:40], 3, *FIRST[50:70], *FIRST[75:], *SECOND[40:90], 5, 6]
PAYLOAD = msgspec.structs.replace(
    SINGLE,
    sources=(*SINGLE.sources, SourceRef("t2", len(SECOND), token_digest(SECOND))),
    segments=(
        CopySegment(0, 0, 40, 0),
        LiteralSegment(40, 1),
        CopySegment(0, 50, 70, 41),
        CopySegment(0, 75, 120, 61),
        CopySegment(1, 40, 90, 106),
        LiteralSegment(156, 2),
    ),
    turn="t3",
)
"""Three copies from two sources after an exact prefix."""
DECODED = 2

pytestmark = pytest.mark.usefixtures("one_salt")


def prepared(kind: str = "gqa") -> ReplayEngine:
    """An engine that holds both sources."""
    engine = make_engine(kind)
    run(engine, FIRST, register("t1"))
    run(engine, SECOND, register("t2"))
    return engine


def state(engine: ReplayEngine) -> object:
    """Everything that a request could leave."""
    engine.check_integrity()
    return snapshot(engine), contents(engine), engine.stats()


@dataclass(frozen=True, slots=True)
class Stage:
    """A function that a request calls, and where it hangs."""

    name: str
    owner: Callable[[ReplayEngine], Any]

    def breaks(self, patch: pytest.MonkeyPatch, engine: ReplayEngine, call: int) -> None:
        """Make the ``call``-th call raise."""
        owner = self.owner(engine)
        broken = fail_at(getattr(owner, self.name), call, RuntimeError("injected"))
        patch.setattr(owner, self.name, broken)

    def counts(self, patch: pytest.MonkeyPatch, engine: ReplayEngine) -> Iterator[int]:
        """From here on, counts the calls; the next value is their number so far."""
        owner, calls = self.owner(engine), count()
        original = getattr(owner, self.name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            next(calls)
            return original(*args, **kwargs)

        patch.setattr(owner, self.name, counted)
        return calls


class Turning:
    """The pool's rotary, whose calls can be replaced."""

    def __init__(self, rotary: Any) -> None:
        self.rotate = rotary.rotate

    def at(self, layer: int) -> Turning:
        """The rotation of every layer."""
        return self


def rotary_of(engine: ReplayEngine) -> Any:
    """The pool's rotary wrapped in a stand-in, since the rotary itself is frozen."""
    pool: Any = engine.cache.pool
    if not isinstance(pool.rotary, Turning):
        pool.rotary = Turning(pool.rotary)
    return pool.rotary


ADMISSION = {
    "resolve": Stage("resolve_edit", lambda _: rules),
    "match": Stage("match", lambda engine: engine.cache),
    "lock": Stage("lock", lambda engine: engine.cache),
    "plan": Stage("plan_turn", lambda _: admission),
    "allocate": Stage("allocate", lambda engine: engine.cache),
    "copy": Stage("copy", lambda engine: engine.cache.pool),
    "rotate": Stage("rotate", rotary_of),
    "derive the lineage": Stage("derive_lineage", lambda _: rules),
    "make the working cache": Stage("WorkingCache", lambda _: engine_module),
    "read the pool": Stage("read", lambda engine: engine.cache.pool),
    "fill the working cache": Stage("fill", lambda _: WorkingCache),
    "write the receipt": Stage("Receipt", lambda _: receipts),
}
RUNNING = {
    "forward": Stage("_model", lambda engine: engine),
    "read the working cache": Stage("rows", lambda _: WorkingCache),
    "write the pool": Stage("write", lambda engine: engine.cache.pool),
    "allocate for an answer": Stage("allocate", lambda engine: engine.cache),
    "fold the keys": Stage("fold_keys", lambda _: sequence),
    "publish": Stage("publish", lambda engine: engine.cache),
    "match for publishing": Stage("match", lambda engine: engine.cache.tree),
    "insert into the tree": Stage("insert", lambda engine: engine.cache.tree),
}
ENDING = {
    "digest the turn": Stage("token_digest", lambda _: retention),
    "retain the turn": Stage("retain", lambda engine: engine.cache.registry),
}
AT_LEAST = {"match": 3, "lock": 3, "copy": 3, "rotate": 6, "read the pool": 8, "forward": 3}
"""Calls that a request makes at least: three copies, two sources, two layers."""


def steps(engine: ReplayEngine, running: Running) -> Iterator[None]:
    """A request from its first chunk to its end, step by step."""
    logits = None
    while logits is None:
        logits = running.prefill_step()
        yield
    for _ in range(DECODED):
        logits = running.decode_step(int(logits.argmax()))
        yield
    running.finish(int(logits.argmax()))
    yield


def abort_behind(engine: ReplayEngine, stop: int) -> None:
    """The request once more, aborted when ``stop`` of its steps are done."""
    running = admit(engine, PROMPT, PAYLOAD)
    for _ in islice(steps(engine, running), stop):
        pass
    running.abort()


def serve_honestly(engine: ReplayEngine) -> torch.Tensor:
    """Serve the same edit once more, with no obstacle now."""
    logits, record = run(engine, PROMPT, PAYLOAD, decode=DECODED)
    assert (record.receipt.outcome, record.receipt.reason) == (Outcome.SPLICED, Reason.SPLICED)
    assert record.receipt.tokens.spliced == 115
    return logits


def calls_of(stage: Stage, whole: bool, patch: pytest.MonkeyPatch) -> int:
    """Count a request's calls of a stage: at admission, or from there to its end."""
    engine = prepared()
    with patch.context() as counting:
        if not whole:
            calls = stage.counts(counting, engine)
            admit(engine, PROMPT, PAYLOAD).abort()
            return next(calls)
        running = admit(engine, PROMPT, PAYLOAD)
        calls = stage.counts(counting, engine)
        for _ in steps(engine, running):
            pass
        return next(calls)


@pytest.mark.parametrize("name", ADMISSION)
def test_a_failure_at_admission_leaves_everything_as_it_was(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is served or fails, whichever call fails, and neither leaves a trace."""
    stage = ADMISSION[name]
    total = calls_of(stage, False, monkeypatch)
    assert total >= AT_LEAST.get(name, 1)
    expected = serve_honestly(prepared())
    for call in range(1, total + 1):
        engine = prepared()
        before = state(engine)
        with monkeypatch.context() as broken:
            stage.breaks(broken, engine, call)
            with suppress(RuntimeError):
                running = admit(engine, PROMPT, PAYLOAD)
                assert running.receipt.reason is Reason.TRANSFORM_FAILED
                assert running.receipt.lineage == ()
                running.abort()
        assert state(engine) == before, f"call {call} of {total}"
        assert torch.equal(serve_honestly(engine), expected)


@pytest.mark.parametrize("name", RUNNING)
def test_a_failure_while_running_leaves_what_an_abort_leaves(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failing step has no effect: things are as if the request had been aborted before it."""
    stage = RUNNING[name]
    total = calls_of(stage, True, monkeypatch)
    assert total >= AT_LEAST.get(name, 1)
    for call in range(1, total + 1):
        engine, twin = prepared(), prepared()
        running = admit(engine, PROMPT, PAYLOAD)
        done = 0
        with monkeypatch.context() as broken:
            stage.breaks(broken, engine, call)
            with pytest.raises(RuntimeError, match="injected"):
                for _ in steps(engine, running):
                    done += 1
        running.abort()
        abort_behind(twin, done)
        # The ledger learns of KV before it can be found, so it may know more than the twin's.
        assert held(engine) == held(twin), f"call {call} of {total}"
        assert contents(engine) == contents(twin)
        assert engine.stats() == twin.stats()
        assert torch.equal(serve_honestly(engine), serve_honestly(twin))


@pytest.mark.parametrize("name", ENDING)
def test_a_turn_that_cannot_be_retained_is_no_source(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its computed KV stays cached, as if it had ended; the registry is as it was."""
    engine, twin = prepared(), prepared()
    registry = repr(engine.cache.registry._sessions)
    running = admit(engine, PROMPT, PAYLOAD)
    with monkeypatch.context() as broken:
        ENDING[name].breaks(broken, engine, 1)
        with pytest.raises(RuntimeError, match="injected"):
            for _ in steps(engine, running):
                pass
    running.abort()
    assert repr(engine.cache.registry._sessions) == registry
    ended = admit(twin, PROMPT, PAYLOAD)
    for _ in steps(twin, ended):
        pass
    assert contents(engine) == contents(twin)
    assert engine.stats() == twin.stats()
    assert torch.equal(serve_honestly(engine), serve_honestly(twin))


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_every_way_to_end_early_gives_everything_back(kind: str) -> None:
    """Aborted after any of its steps, a request keeps no slot and no lock."""
    engine = prepared(kind)
    total = sum(1 for _ in steps(engine, admit(engine, PROMPT, PAYLOAD)))
    assert total >= 4
    for stop in range(total):
        engine = prepared(kind)
        registry = repr(engine.cache.registry._sessions)
        abort_behind(engine, stop)
        engine.check_integrity()
        assert engine.stats().in_flight == 0
        assert repr(engine.cache.registry._sessions) == registry


def test_the_comparison_sees_a_changed_byte() -> None:
    """Control: one stored value that differs is a difference."""
    engine, twin = prepared(), prepared()
    assert state(engine) == state(twin)
    slot = next(engine.cache.tree.nodes()).slots[0]
    engine.cache.pool._tensors[1][0][slot, 0, 0] += 1
    assert state(engine) != state(twin)


def test_the_comparison_sees_a_lock_a_slot_and_a_turn() -> None:
    """Control: so is what a running request holds, and a turn that is retained."""
    engine = prepared()
    before = state(engine)
    running = admit(engine, PROMPT, PAYLOAD)
    assert state(engine) != before
    prefill(running)
    running.finish(1)
    assert state(engine) != before
