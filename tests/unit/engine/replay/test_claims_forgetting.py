"""The limits of claims: a forget, a flush, a fault."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from claims_kit import (
    ask,
    cached,
    check_claims,
    claim,
    keep,
    kinds,
    make_engine,
    named,
    run,
    start,
    status,
    tokens,
)
from support.replay_engine import blank, free_slots

from leyline_engine.claims.events import Lost
from leyline_engine.contract import (
    ClaimKind,
    ClaimState,
    Directive,
    ForgetCounts,
    Mode,
    SourceRef,
    SpanLabel,
    token_digest,
)
from leyline_engine.records.lineage import fold_keys
from leyline_replay.engine import RefusedByClaimError, ReplayEngine


def forgetting(
    turn: str, source: list[int], gap: tuple[int, int], source_turn: str
) -> tuple[list[int], Any]:
    """A turn that forgets a gap of another, known by its tokens: prompt and payload."""
    whole = [*source, 5]
    payload = named(
        turn,
        sources=(SourceRef(source_turn, len(whole), token_digest(whole)),),
        directives=(Directive(*gap, (), Mode.FORGET),),
    )
    return [*source[: gap[0]], *source[gap[1] :], 9], payload


def slots(engine: ReplayEngine, prompt: list[int]) -> list[int]:
    """Slots of what is cached of a prompt."""
    found: list[int] = engine.cache.tree.peek(fold_keys(prompt)).tolist()
    return found


def test_a_forget_beats_a_claim() -> None:
    """Forgotten text is overwritten at once, locked or not, and the claims on it are harmed."""
    engine = make_engine(900)
    source = keep(engine, "t1", 200, 1)
    claim(engine, "t1", 150, id="hard")
    claim(engine, "t1", 150, id="soft", kind=ClaimKind.SOFT)
    claim(engine, "t1", 90, id="before")
    doomed = slots(engine, source)[100:]
    prompt, payload = forgetting("t2", source, (100, 120), "t1")
    record = run(engine, prompt, payload)
    assert record.receipt.forgot == ForgetCounts(overwritten=100)
    assert status(engine, "hard").state is ClaimState.HARMED
    assert status(engine, "hard").cause == "forgotten"
    assert status(engine, "soft").state is ClaimState.HARMED
    assert status(engine, "before").state is ClaimState.MATERIALIZED
    assert engine.stats().doomed == 0
    lost = [e for e in engine.claims.keeper.ledger if isinstance(e, Lost)]
    assert [(run.start, run.end) for run in lost[0].runs] == [(100, 150)]
    free = set(free_slots(engine).tolist())
    gone = np.array([slot for slot in doomed if slot in free])
    assert len(gone)
    assert blank(engine, gone)


def test_a_claim_over_what_others_sent_as_well_survives_a_forget() -> None:
    """Its KV isn't this session's alone."""
    engine = make_engine(900)
    source = keep(engine, "t1", 200, 1)
    run(engine, [*source, 3], named("o1", session="other"))
    assert claim(engine, "o1", 150, session="other").problem is None
    prompt, payload = forgetting("t2", source, (100, 120), "t1")
    record = run(engine, prompt, payload)
    assert record.receipt.forgot == ForgetCounts(shared_retained=100)
    assert status(engine).state is ClaimState.MATERIALIZED


def test_a_claim_cannot_keep_away_the_request_that_forgets_what_it_claims() -> None:
    """The claimed text is forgotten first, and then there is room."""
    engine = make_engine(400)
    source = keep(engine, "t1", 300, 1)
    claim(engine, "t1", 300)
    prompt, payload = forgetting("t2", source, (50, 60), "t1")
    record = run(engine, prompt, payload)
    assert record.receipt.forgot == ForgetCounts(overwritten=250)
    assert status(engine).state is ClaimState.HARMED
    assert "RequestRefused" not in kinds(engine)


def test_a_refused_request_forgets_all_the_same() -> None:
    """Others' claims keep it from running, not from forgetting."""
    engine = make_engine(500)
    source = keep(engine, "t1", 200, 1)
    keep(engine, "o1", 250, 2, session="other")
    claim(engine, "o1", 250, session="other")
    prompt, payload = forgetting("t2", source, (50, 60), "t1")
    with pytest.raises(RefusedByClaimError) as refused:
        engine.admit(ask([*prompt, *tokens(200, 3)], payload))
    assert refused.value.forgot == ForgetCounts(overwritten=150)
    assert cached(engine, source) == 50
    engine.check_integrity()


def test_a_forget_waits_for_running_requests_and_for_no_claim() -> None:
    """Slots that both hold are overwritten when the request ends."""
    engine = make_engine(900)
    source = keep(engine, "t1", 200, 1)
    claim(engine, "t1", 200)
    running = start(engine, ask([*source, 7], named("r1")))
    prompt, payload = forgetting("t2", source, (100, 120), "t1")
    forgetter = start(engine, ask(prompt, payload))
    assert forgetter.receipt.forgot is not None and forgetter.receipt.forgot.pending
    assert status(engine).state is ClaimState.HARMED
    forgetter.finish()
    running.finish()
    (counts,) = engine.settled_forgets().values()
    assert counts.pending == 0 and engine.stats().doomed == 0


def test_a_flush_harms_every_claim() -> None:
    """Hard or soft; every slot is free afterwards, every name gone."""
    engine = make_engine(600)
    keep(engine, "t1", 100, 1)
    keep(engine, "t2", 100, 2)
    claim(engine, "t1", 100, id="hard")
    claim(engine, "t2", 100, id="soft", kind=ClaimKind.SOFT, priority=4)
    engine.flush()
    engine.check_integrity()
    check_claims(engine)
    for name in ("hard", "soft"):
        assert (status(engine, name).state, status(engine, name).cause) == (
            ClaimState.HARMED,
            "flushed",
        )
    assert engine.stats().free == engine.stats().capacity
    (lost,) = [e for e in engine.claims.keeper.ledger if isinstance(e, Lost)]
    assert lost.free == 600


def test_lost_slots_harm_the_claims_on_them() -> None:
    """Slots after the fault go as well: nothing could find them any more."""
    engine = make_engine(600)
    source = keep(engine, "t1", 100, 1)
    claim(engine, "t1", 100, id="over")
    claim(engine, "t1", 40, id="before")
    engine.cache.lose(fold_keys(source), 60, "device_fault")
    engine.check_integrity()
    check_claims(engine)
    assert (status(engine, "over").state, status(engine, "over").cause) == (
        ClaimState.HARMED,
        "device_fault",
    )
    assert status(engine, "before").state is ClaimState.MATERIALIZED
    assert cached(engine, source) == 60
    engine.cache.lose(fold_keys(source), 60, "device_fault")
    assert kinds(engine).count("Lost") == 1


def test_labels_name_what_a_claimed_forget_reaches() -> None:
    """They name it for a forget by name, too: KV that never read the span stays claimed."""
    engine = make_engine(900)
    prompt = tokens(196, 1)
    labels = (SpanLabel("head", 0, 120), SpanLabel("secret", 120, 196))
    run(engine, prompt, named("t1", spans=labels))
    claim(engine, "t1", 120, id="head")
    claim(engine, "t1", 196, id="all")
    after = (SpanLabel("head", 0, 120), SpanLabel("new", 120, 121))
    payload = named("t2", spans=after, forget=("secret",))
    run(engine, [*prompt[:120], 9], payload)
    assert status(engine, "head").state is ClaimState.MATERIALIZED
    assert status(engine, "all").state is ClaimState.HARMED


@pytest.mark.parametrize("kind", [ClaimKind.HARD, ClaimKind.SOFT])
def test_a_retirement_spares_what_a_claim_holds(kind: ClaimKind) -> None:
    """KV of a retired turn is free at once, but for a claim's; nothing is harmed."""
    engine = make_engine(900)
    claimed = keep(engine, "t1", 200, 1)
    control = keep(engine, "t1", 200, 2, session="other")
    claim(engine, "t1", 90, kind=kind)
    keep(engine, "t2", 20, 3, retire=("t1",))
    keep(engine, "t2", 20, 4, session="other", retire=("t1",))
    assert (cached(engine, claimed), cached(engine, control)) == (90, 0)
    assert status(engine).state is ClaimState.MATERIALIZED
    check_claims(engine)
