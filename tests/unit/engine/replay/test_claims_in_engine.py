"""Claims on a real engine: what is refused, what is kept and in which order, and what moves."""

from __future__ import annotations

import pytest
from claims_kit import (
    SESSION,
    TENANT,
    ask,
    cached,
    claim,
    command,
    cut,
    keep,
    kinds,
    make_engine,
    named,
    release,
    run,
    start,
    status,
    tokens,
)

from leyline_engine.claims.events import Evicted
from leyline_engine.contract import (
    ClaimKind,
    ClaimState,
    DemoteClaim,
    Outcome,
    ProblemCode,
)
from leyline_replay.engine import PoolExhaustedError, PromptTooLongError, RefusedByClaimError


def test_a_request_that_cannot_fit_beside_a_hard_claim_is_refused_at_once() -> None:
    """Nothing is taken, the claim is named and counts the pressure; after its release it runs."""
    engine = make_engine(400)
    keep(engine, "plan", 200, 1)
    assert claim(engine, "plan", 200).problem is None
    before = engine.stats()
    request = ask(tokens(250, 2), named("big"))
    with pytest.raises(RefusedByClaimError) as refused:
        engine.admit(request)
    refusal = refused.value.refusal
    assert (refusal.own, refusal.others, refusal.retry_after_ms) == (("c",), 0, None)
    assert (refusal.needed, refusal.protected, refusal.usable) == (255, 200, 400)
    assert "yours (c)" in str(refused.value) and "released" in str(refused.value)
    assert engine.stats() == before
    assert kinds(engine)[-2:] == ["Arrived", "RequestRefused"]
    assert status(engine).pressure == 1
    release(engine)
    engine.admit(request).abort()


def test_other_tenants_claims_are_a_number() -> None:
    """No id of theirs is reported."""
    engine = make_engine(400)
    keep(engine, "plan", 200, 1)
    claim(engine, "plan", 200, id="secret-name")
    with pytest.raises(RefusedByClaimError) as refused:
        engine.admit(ask(tokens(250, 2), named("big", tenant="other")))
    assert (refused.value.refusal.own, refused.value.refusal.others) == ((), 1)
    assert "secret-name" not in str(refused.value)
    with pytest.raises(RefusedByClaimError) as refused:
        engine.admit(ask(tokens(250, 2)))
    assert refused.value.refusal.others == 1


def test_what_a_request_shares_with_a_claim_counts_once() -> None:
    """It continues from claimed KV, which is there already; a stranger of the same size can't."""
    engine = make_engine(400)
    plan = keep(engine, "plan", 300, 1)
    claim(engine, "plan", 300)
    run(engine, [*plan, *tokens(80, 3)], named("next"))
    assert status(engine).hits == 1
    with pytest.raises(RefusedByClaimError):
        engine.admit(ask(tokens(380, 4), named("stranger", session="z")))


def test_spliced_kv_under_a_claim_counts_once_too() -> None:
    """It is found by its lineage."""
    engine = make_engine(700)
    keep(engine, "t1", 240, 1)
    prompt, payload = cut(engine, "t1", "t2", (50, 60))
    record = run(engine, prompt, payload)
    assert record.receipt.outcome is Outcome.SPLICED
    claim(engine, "t2", 230)
    claim(engine, "t1", 240, id="d")
    # 50 exact ones are common to both claims.
    assert engine.claims.keeper.book.protected_pages == 50 + 180 + 190
    longer = [*prompt, 1, 2, 3, 4, *tokens(200, 3)]
    follow = named("t3", lineage=record.receipt.lineage)
    run(engine, longer, follow)
    with pytest.raises(RefusedByClaimError):
        engine.admit(ask(longer, named("t4", session="z")))


def test_nothing_is_refused_for_soft_claims() -> None:
    """They give way, in order, and say so."""
    engine = make_engine(400)
    plan = keep(engine, "plan", 200, 1)
    claim(engine, "plan", 200, kind=ClaimKind.SOFT, priority=3)
    run(engine, tokens(350, 2), named("big"))
    assert status(engine).state is ClaimState.EVICTED
    evicted = [e for e in engine.claims.keeper.ledger if isinstance(e, Evicted)]
    assert [(e.request[0], [(r.start, r.end) for r in e.runs]) for e in evicted] == [
        ("r", [(0, 200)])
    ]
    assert cached(engine, plan) == 0


def test_a_soft_claim_goes_after_what_is_younger_and_unclaimed() -> None:
    """Its priority is reported as pressure, and its hits continue."""
    engine = make_engine(400)
    plan = keep(engine, "plan", 150, 1)
    young = keep(engine, "young", 150, 2)
    claim(engine, "plan", 150, kind=ClaimKind.SOFT, priority=3)
    run(engine, tokens(150, 3), named("big"))
    assert cached(engine, plan) == 150 and cached(engine, young) == 0
    assert (status(engine).state, status(engine).pressure) == (ClaimState.MATERIALIZED, 1)


def test_two_soft_claims_over_one_path_lose_it_together() -> None:
    """One eviction, one fact; the shorter claim ends by its own terms."""
    engine = make_engine(400)
    keep(engine, "plan", 200, 1)
    claim(engine, "plan", 200, id="long", kind=ClaimKind.SOFT, share=0.4)
    claim(engine, "plan", 100, id="short", kind=ClaimKind.SOFT)
    run(engine, tokens(250, 2), named("big"))
    assert status(engine, "long").state is ClaimState.MATERIALIZED
    assert status(engine, "long").resident_tokens == 100
    assert status(engine, "short").state is ClaimState.MATERIALIZED
    run(engine, tokens(330, 3), named("bigger"))
    assert status(engine, "long").state is status(engine, "short").state is ClaimState.EVICTED
    facts = [e.runs for e in engine.claims.keeper.ledger if isinstance(e, Evicted)]
    assert [[(run.start, run.end) for run in runs] for runs in facts] == [[(100, 200)], [(0, 100)]]


def test_a_demoted_claim_stays_in_order_only() -> None:
    """Its locks are gone, its priority counts."""
    engine = make_engine(400)
    plan = keep(engine, "plan", 150, 1)
    young = keep(engine, "young", 150, 2)
    claim(engine, "plan", 150, 20, priority=3)
    assert command(engine, DemoteClaim(TENANT, "c")).problem is None
    run(engine, tokens(150, 3), named("big"))
    assert cached(engine, plan) == 150 and cached(engine, young) == 0
    run(engine, tokens(380, 4), named("bigger"))
    assert status(engine).state is ClaimState.EVICTED


def test_nothing_else_is_held_by_a_claim() -> None:
    """A claim on half of a span from the middle holds that half and what it builds on, no more."""
    engine = make_engine(400)
    plan = keep(engine, "plan", 200, 1)
    claim(engine, "plan", 180, 100, share=0.5)
    assert status(engine).resident_tokens == 40
    assert engine.claims.keeper.book.protected_pages == 140
    run(engine, tokens(250, 2), named("big"))
    assert cached(engine, plan) == 140


def test_without_claims_names_and_ranks_cost_nothing() -> None:
    """No slot has a name, no event is recorded."""
    engine = make_engine(400)
    for seed in range(4):
        keep(engine, f"t{seed}", 150, seed)
    assert kinds(engine) == ["Opened"]
    assert len(engine.claims.keeper.names) == 0


@pytest.mark.parametrize("by_request", [False, True])
def test_write_no_admit_leaves_nothing_behind(by_request: bool) -> None:
    """The session leaves no KV and no turn, and every slot comes back; cached KV is still used."""
    engine = make_engine(600)
    plan = keep(engine, "plan", 100, 1)
    if not by_request:
        claim(engine, "plan", 100, kind=ClaimKind.SOFT, write_no_admit=True)
    before = engine.stats()
    request = ask([*plan, *tokens(60, 2)], named("private"), admits=not by_request)
    sequence = start(engine, request)
    sequence.decode_step(1)
    assert sequence.receipt.tokens.prefix == 104 - 4
    record = sequence.finish(2)
    assert record.receipt.turn == ""
    assert engine.stats() == before
    assert engine.cache.registry.get((TENANT, SESSION), "private") is None
    run(engine, tokens(60, 3), named("theirs", session="z"))
    assert cached(engine, tokens(60, 3)) == 60
    release(engine) if not by_request else None
    run(engine, tokens(60, 4), named("public"))
    assert cached(engine, tokens(60, 4)) == 60


def test_an_edit_of_a_session_that_is_not_admitted_is_spliced_all_the_same() -> None:
    """The splice is for itself alone."""
    engine = make_engine(900)
    keep(engine, "t1", 240, 1)
    claim(engine, "t1", 40, kind=ClaimKind.SOFT, write_no_admit=True)
    prompt, payload = cut(engine, "t1", "t2", (50, 60))
    before = engine.stats()
    record = run(engine, prompt, payload)
    assert record.receipt.outcome is Outcome.SPLICED and record.receipt.turn == ""
    assert engine.stats() == before
    assert status(engine).claim.predicate.source == "t1"


def test_a_claim_goes_where_an_edit_puts_its_tokens() -> None:
    """Moved by a cut before it, shrunk by one within, harmed when none is left."""
    engine = make_engine(1500)
    keep(engine, "t1", 240, 1)
    claim(engine, "t1", 200, 100)
    run(engine, *cut(engine, "t1", "t2", (50, 60)))
    moved = status(engine).claim.predicate
    assert (moved.source, moved.start, moved.end) == ("t2", 90, 190)
    assert engine.claims.keeper.book.protected_pages == 190
    run(engine, *cut(engine, "t2", "t3", (150, 160)))
    shrunk = status(engine).claim.predicate
    assert (shrunk.source, shrunk.start, shrunk.end) == ("t3", 90, 180)
    run(engine, *cut(engine, "t3", "t4", (80, 185)))
    assert (status(engine).state, status(engine).cause) == (ClaimState.HARMED, "edited away")
    assert engine.claims.keeper.book.protected_pages == 0
    assert engine.claims.shelf.locked() == []


def test_an_edit_that_could_not_be_spliced_leaves_the_claim_where_it_is() -> None:
    """Its tokens didn't go anywhere."""
    engine = make_engine(420)
    keep(engine, "t1", 240, 1)
    claim(engine, "t1", 200, 100)
    record = run(engine, *cut(engine, "t1", "t2", (50, 60)))
    assert record.receipt.outcome is Outcome.REPREFILLED
    assert status(engine).claim.predicate.source == "t1"
    assert status(engine).state is ClaimState.MATERIALIZED


def test_what_never_fits_is_no_claims_fault() -> None:
    """Too long is too long, also beside a claim."""
    engine = make_engine(400)
    keep(engine, "plan", 300, 1)
    claim(engine, "plan", 300)
    with pytest.raises(PromptTooLongError):
        engine.admit(ask(tokens(420, 2)))
    with pytest.raises(PromptTooLongError):
        engine.examine(ask([]))


def test_a_request_that_waits_for_others_is_not_refused() -> None:
    """It fits beside the claims once they end."""
    engine = make_engine(400)
    keep(engine, "plan", 100, 1)
    claim(engine, "plan", 100)
    first = start(engine, ask(tokens(200, 2)))
    with pytest.raises(PoolExhaustedError):
        engine.admit(ask(tokens(200, 3)))
    first.finish()
    engine.admit(ask(tokens(200, 3))).abort()


def test_who_finds_no_slot_to_go_on_is_told_of_the_claims() -> None:
    """Alone it would have fitted; beside a claim and another request it doesn't."""
    engine = make_engine(400)
    keep(engine, "plan", 100, 1)
    requests = [ask(tokens(148, seed), named(f"n{seed}"), room=20) for seed in (2, 3)]
    alone = engine.admit(requests[0])
    assert engine.outgrown(requests[0], alone) is None
    claim(engine, "plan", 100)
    error = engine.outgrown(requests[0], alone)
    assert error is not None and error.began
    assert (error.refusal.own, error.refusal.retry_after_ms) == (("c",), 0)
    assert "other requests have ended" in str(error)
    assert status(engine).pressure == 1
    alone.abort()
    claim(engine, "plan", 104, id="d")
    late = ask(tokens(280, 4), named("n4"), room=100)
    with pytest.raises(RefusedByClaimError):
        engine.admit(late)


def test_claims_on_what_the_engine_does_not_know_are_refused() -> None:
    """Unknown sessions and turns, foreign tenants, a span past the end."""
    engine = make_engine(600)
    keep(engine, "t1", 100, 1)
    for terms in ({"session": "never"}, {"tenant": "other"}):
        reply = claim(engine, "t1", 100, **terms)
        assert reply.problem is not None
        assert (reply.problem.code, reply.problem.field) == (
            ProblemCode.INVALID_CLAIM,
            "predicate.source",
        )
    reply = claim(engine, "t1", 101)
    assert reply.problem is not None and reply.problem.field == "predicate.end"
    assert not engine.claims.keeper


def test_limits_are_the_engines_own() -> None:
    """They are as configured, by name."""
    engine = make_engine(600, share=0.1)
    keep(engine, "t1", 100, 1)
    assert claim(engine, "t1", 60).problem is None
    reply = claim(engine, "t1", 61, revision=2)
    assert reply.problem is not None
    assert (reply.problem.code, reply.problem.field) == (ProblemCode.CLAIM_LIMIT, "share")
