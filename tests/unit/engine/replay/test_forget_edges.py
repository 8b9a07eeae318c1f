"""Forgetting at its edges: shared nodes, mixed modes, two sources, and erases that fail."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from support.replay_engine import (
    SCOPE,
    admit,
    blank,
    cached,
    edit,
    fail_at,
    free_slots,
    make_engine,
    prefill,
    random_tokens,
    reference,
    register,
    retained,
    run,
    same_logits,
)

from leyline_engine.contract import (
    CopySegment,
    Directive,
    EditPayload,
    LiteralSegment,
    Mode,
    Outcome,
    Reason,
    SourceRef,
    TurnRecord,
    token_digest,
)
from leyline_engine.records.lineage import fold_keys
from leyline_replay.cache.radix import MAX_OWNERS, SHARED
from leyline_replay.engine import ReplayEngine

SOURCE = random_tokens(100, 3)
FORGET = Directive(60, 70, (), Mode.FORGET)


def forget_span(engine: ReplayEngine, session: str = "s") -> TurnRecord:
    """Forget ``SOURCE[60:70]`` on behalf of a session whose turn t1 is ``SOURCE``."""
    prompt, payload = edit(SOURCE, [FORGET], tail=[9], turn="forgetting", session=session)
    _, record = run(engine, prompt, payload)
    assert record.receipt.reason is Reason.REPREFILLED
    return record


def test_the_last_owner_to_forget_erases() -> None:
    """Each forget takes one owner off a shared node; with the last one it goes, blank."""
    engine = make_engine()
    sessions = ["a", "b", "c"]
    for name in sessions:
        run(engine, SOURCE, register("t1", session=name))
    slots = cached(engine, SOURCE)[60:]
    for name in sessions[:-1]:
        record = forget_span(engine, name)
        assert record.receipt.forgot and record.receipt.forgot.shared_retained == 40
        assert record.receipt.tokens.freed == 0
        assert len(cached(engine, SOURCE)) == 100
    prompt, payload = edit(SOURCE, [FORGET], tail=[9], session="c")
    sequence = admit(engine, prompt, payload)
    assert sequence.receipt.tokens.freed == 40
    assert len(cached(engine, SOURCE)) == 60
    assert blank(engine, slots)
    sequence.abort()
    engine.check_integrity()


def test_shared_slots_are_counted_once() -> None:
    """Two turns over one shared path retain its 20 slots, not 40."""
    engine = make_engine()
    run(engine, SOURCE, register("t1"))
    run(engine, [*SOURCE[:90], 1], register("t2"))
    run(engine, SOURCE[:80], register("t1", session="z"))
    prompt, payload = edit(SOURCE, [FORGET], tail=[9], turn="t3")
    _, record = run(engine, prompt, payload)
    assert record.receipt.forgot and record.receipt.forgot.shared_retained == 20


def test_another_scope_is_another_owner() -> None:
    """The same session name under another tenant owns its own; forgetting here leaves it."""
    engine = make_engine()
    run(engine, SOURCE, register("t1"))
    run(engine, SOURCE, register("t1", scope="other"))
    record = forget_span(engine)
    assert record.receipt.forgot and record.receipt.forgot.shared_retained == 40
    assert len(cached(engine, SOURCE)) == 100


@pytest.mark.parametrize(("owners", "left"), [(MAX_OWNERS, 60), (MAX_OWNERS + 1, 100)])
def test_a_node_with_too_many_owners_is_shared_for_good(owners: int, left: int) -> None:
    """Up to the bound every owner is known and can forget; one more, and the node is common."""
    engine = make_engine(pool=900)
    sessions = [f"s{number}" for number in range(owners)]
    for name in sessions:
        run(engine, SOURCE, register("t1", session=name))
    node = engine.cache.match(fold_keys(SOURCE)).node
    assert node.owners == ({SHARED} if left == 100 else {(SCOPE, name) for name in sessions})
    longer = [*SOURCE, 5, 6]
    run(engine, longer, register("t2", session=sessions[0]))
    assert node.children[5].owners == {(SCOPE, sessions[0])}
    for name in sessions:
        assert len(cached(engine, longer)) == (102 if name == sessions[0] else 100)
        spared = [fold_keys(SOURCE[:60])]
        engine.cache.forget((SCOPE, name), None, spared=spared, ticket=name)
        engine.check_integrity()
    assert len(cached(engine, longer)) == left


def test_what_hangs_below_a_common_prefix_is_still_forgotten() -> None:
    """A session's own tail goes though the prefix under it belongs to everybody."""
    engine = make_engine()
    run(engine, SOURCE[:80])
    assert engine.cache.match(fold_keys(SOURCE[:80])).node.owners == {SHARED}
    run(engine, SOURCE, register("t1"))
    record = forget_span(engine)
    assert record.receipt.tokens.freed == 20
    assert len(cached(engine, SOURCE)) == 80


def test_mixed_modes_splice_up_to_the_forget() -> None:
    """An amortized cut before the forgotten span is spliced; all after the span is new."""
    engine = make_engine()
    run(engine, SOURCE, register("t1"))
    values = [engine.cache.pool.read(layer, cached(engine, SOURCE)[45:60]) for layer in range(2)]
    slots = cached(engine, SOURCE)[40:]
    prompt, payload = edit(SOURCE, [Directive(40, 45), FORGET], tail=[9])
    sequence = admit(engine, prompt, payload)
    receipt = sequence.receipt
    assert (receipt.outcome, receipt.reason) == (Outcome.SPLICED, Reason.SPLICED)
    assert (receipt.tokens.prefix, receipt.tokens.spliced) == (40, 15)
    assert [result.reason for result in receipt.directives] == [Reason.SPLICED, Reason.REPREFILLED]
    assert receipt.tokens.freed == 60
    assert blank(engine, slots)
    prefill(sequence)
    spliced = cached(engine, prompt, receipt.lineage)[40:55]
    for layer, before in enumerate(values):
        after = engine.cache.pool.read(layer, spliced)
        assert after[1].equal(before[1])
    sequence.finish()
    engine.check_integrity()
    assert retained(engine) == ["t2"]
    assert len(cached(engine, SOURCE)) == 40


def test_mixed_modes_in_an_already_spliced_turn_forget_from_the_splice_on() -> None:
    """After an earlier splice nothing may be reused, whatever precedes the forgotten span."""
    engine = make_engine()
    run(engine, SOURCE, register("t1"))
    first, payload = edit(SOURCE, [Directive(40, 45)], tail=[9])
    _, spliced = run(engine, first, payload)
    directives = [Directive(50, 52), Directive(60, 65, (), Mode.FORGET)]
    lineage = spliced.receipt.lineage
    again, redact = edit(first, directives, tail=[8], source_turn="t2", turn="t3", lineage=lineage)
    logits, record = run(engine, again, redact)
    assert (record.receipt.tokens.prefix, record.receipt.tokens.spliced) == (40, 0)
    assert record.receipt.lineage == ()
    assert same_logits(logits, reference(again))
    assert len(cached(engine, first, lineage)) == 40


@pytest.mark.parametrize(
    ("common", "span", "lent"),
    [(60, 70, 60), (60, 50, 50), (0, 70, 0)],
    ids=["up to where they part", "up to the span", "nothing in common"],
)
def test_a_second_source_that_names_the_span_limits_the_first(
    common: int, span: int, lent: int
) -> None:
    """The first source lends only what precedes the span in the second and is in both."""
    engine = make_engine(pool=900)
    other = [*SOURCE[:common], *random_tokens(100 - common, 31)]
    run(engine, SOURCE, register("t1"))
    run(engine, other, register("t2"))
    prompt = [7, *SOURCE, 9]
    payload = EditPayload(
        session="s",
        scope=SCOPE,
        turn="t3",
        sources=tuple(
            SourceRef(turn, 100, token_digest(tokens))
            for turn, tokens in (("t1", SOURCE), ("t2", other))
        ),
        directives=(Directive(span, span + 5, (), Mode.FORGET, source=1),),
        segments=(LiteralSegment(0, 1), CopySegment(0, 0, 100, 1), LiteralSegment(101, 1)),
    )
    logits, record = run(engine, prompt, payload)
    # Copied tokens land one further on, and those below the sink of 32 are prefilled.
    assert record.receipt.tokens.spliced == max(0, lent + 1 - 32)
    assert record.receipt.directives[0].reason is Reason.REPREFILLED
    assert len(cached(engine, SOURCE)) == len(cached(engine, other)) == 0
    if not lent:
        assert same_logits(logits, reference(prompt))
    amortized = msgspec.structs.replace(
        payload, turn="t4", directives=(Directive(span, span + 5, source=1),)
    )
    run(engine, SOURCE, register("t1"))
    run(engine, other, register("t2"))
    _, control = run(engine, [6, *prompt[1:]], amortized)
    assert control.receipt.tokens.spliced == 69


def test_a_start_that_fails_behind_a_forget_undoes_admission() -> None:
    """The span stays forgotten; the request's slots and lock are given back."""
    engine = make_engine()
    run(engine, SOURCE, register("t1"))
    slots = cached(engine, SOURCE)[40:]
    prompt, payload = edit(SOURCE, [Directive(40, 45), FORGET], tail=[9])
    read = engine.cache.pool.read
    failing = fail_at(read, 1, MemoryError("x"))
    engine.cache.pool.read = failing  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        admit(engine, prompt, payload)
    engine.cache.pool.read = read  # type: ignore[method-assign]
    engine.check_integrity()
    stats = engine.stats()
    assert (stats.free, stats.cached) == (stats.capacity - 40, 40)
    assert (stats.in_flight, stats.doomed) == (0, 0)
    assert blank(engine, slots)


def test_forget_reaches_what_another_session_drew_from_its_lineage() -> None:
    """A session that never sent the span has no claim to KV that remembers it."""
    engine = make_engine()
    run(engine, SOURCE, register("t1"))
    prompt, payload = edit(SOURCE, [Directive(60, 70)], tail=[9, 8])
    _, spliced = run(engine, prompt, payload)
    lineage = spliced.receipt.lineage
    branch = EditPayload(session="z", scope=SCOPE, turn="z1", lineage=lineage)
    _, drawn = run(engine, [*prompt, 4], branch)
    assert drawn.receipt.tokens.prefix == len(prompt)
    again, redact = edit(SOURCE, [FORGET], tail=[5], turn="t3")
    run(engine, again, redact)
    assert len(cached(engine, prompt, lineage)) <= 60


def test_a_start_that_fails_behind_a_forget_withholds_what_runs() -> None:
    """Once a forget has been done, what ran beside it isn't published, start or no start."""
    engine = make_engine()
    run(engine, SOURCE, register("t1"))
    beside = random_tokens(80, 33)
    running = admit(engine, beside, register("t2"))
    prompt, payload = edit(SOURCE, [FORGET], tail=[9], turn="t3")
    read = engine.cache.pool.read
    failing = fail_at(read, 1, MemoryError("x"))
    engine.cache.pool.read = failing  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        admit(engine, prompt, payload)
    prefill(running)
    running.finish()
    assert retained(engine) == []
    assert len(cached(engine, beside)) == 0


class BreakableErase:
    """A stand-in for the pool's erase; ``broken`` decides whether it fails."""

    def __init__(self, engine: ReplayEngine) -> None:
        self.broken = True
        self._erase = engine.cache.pool.erase
        engine.cache.pool.erase = self  # type: ignore[method-assign]

    def __call__(self, slots: Any) -> None:
        if self.broken:
            raise RuntimeError("x")
        self._erase(slots)


def test_an_erase_that_fails_is_retried() -> None:
    """Slots that couldn't be overwritten have no owner until they are."""
    engine = make_engine()
    run(engine, SOURCE, register("t1"))
    slots = cached(engine, SOURCE)[60:]
    prompt, payload = edit(SOURCE, [FORGET], tail=[9])
    erase = BreakableErase(engine)
    with pytest.raises(RuntimeError, match="x"):
        admit(engine, prompt, payload)
    engine.check_integrity()
    stats = engine.stats()
    assert (stats.cached, stats.doomed, stats.in_flight) == (60, 40, 0)
    assert stats.free == stats.capacity - 100
    assert len(cached(engine, SOURCE)) == 60
    free = set(free_slots(engine).tolist())
    assert not free & set(slots.tolist())
    assert not blank(engine, slots)

    erase.broken = False
    logits, record = run(engine, prompt, payload)
    assert same_logits(logits, reference(prompt))
    assert record.receipt.reason is Reason.REPREFILLED
    assert engine.stats().doomed == 0
    assert retained(engine) == ["t2"]


def failed_forget(engine: ReplayEngine, session: str = "s") -> BreakableErase:
    """A forget whose erase failed, and keeps failing: 40 slots wait to be overwritten."""
    erase = BreakableErase(engine)
    prompt, payload = edit(SOURCE, [FORGET], tail=[9], session=session)
    with pytest.raises(RuntimeError, match="x"):
        admit(engine, prompt, payload)
    engine.check_integrity()
    return erase


@pytest.mark.parametrize("complete", [True, False])
def test_others_end_while_an_erase_keeps_failing(complete: bool) -> None:
    """A request that ends meanwhile may fail, but keeps the accounts right."""
    engine = make_engine()
    run(engine, SOURCE, register("t1"))
    other = admit(engine, random_tokens(20, 5), register("t1", session="z"))
    erase = failed_forget(engine)
    with suppress(RuntimeError):
        if complete:
            prefill(other)
        other.abort()
    engine.check_integrity()
    erase.broken = False


def test_a_withheld_request_ends_while_an_erase_fails() -> None:
    """Slots that can't be overwritten have one owner, not the ended request as well."""
    engine = make_engine()
    run(engine, SOURCE, register("t1"))
    running = admit(engine, SOURCE + random_tokens(50, 7), register("t2"))
    running.prefill_step()
    prompt, payload = edit(SOURCE, [FORGET], tail=[5], turn="t3")
    admit(engine, prompt, payload)
    BreakableErase(engine)
    with suppress(RuntimeError):
        running.abort()
    engine.check_integrity()


def test_a_splice_while_an_erase_keeps_failing() -> None:
    """Letting go of the sources fails; the copies' slots aren't lost with it."""
    engine = make_engine()
    run(engine, SOURCE, register("t1"))
    mine = random_tokens(80, 40)
    run(engine, mine, register("t1", session="z"))
    failed_forget(engine)
    prompt, payload = edit(mine, [Directive(40, 45)], tail=[3], session="z")
    with suppress(RuntimeError):
        admit(engine, prompt, payload)
    engine.check_integrity()
