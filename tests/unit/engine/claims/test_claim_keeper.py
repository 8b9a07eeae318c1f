"""The keeper over a naive cache: its demands on the cache, and its reports."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from keeper_kit import POOL, Desk

from leyline_engine.claims.events import EventLedger, Evicted, Lost
from leyline_engine.claims.feasibility import Arithmetic
from leyline_engine.claims.keeper import ArrivingRequest, ClaimKeeper
from leyline_engine.claims.runs import pages_of
from leyline_engine.claims.states import State
from leyline_engine.contract import (
    ClaimKind,
    CopySegment,
    DemoteClaim,
    GetClaim,
    GetClaimEvents,
    ListClaims,
    ProblemCode,
    ReleaseClaim,
)


def test_a_hard_claim_locks_what_it_needs_and_what_that_stands_on() -> None:
    """No later token is locked."""
    desk = Desk()
    turn = desk.turn(range(10))
    desk.claim(turn.turn, 8, 4, share=0.5)
    assert desk.shelf.locks == {("t", "c"): tuple(range(6))}
    assert desk.status().resident_tokens == 2
    desk.keeper.carry_out(DemoteClaim("t", "c"))
    assert desk.shelf.locks == {}
    assert desk.shelf.ranks == {("t", "c"): (tuple(range(6)), 0)}


def test_what_no_claim_holds_has_no_name() -> None:
    """The rest of a span has none, nor has the text before a soft one."""
    desk = Desk()
    turn = desk.turn(range(10))
    desk.claim(turn.turn, 10, share=0.3)
    assert len(desk.keeper.names) == 3
    desk.claim(turn.turn, 9, 5, id="soft", kind=ClaimKind.SOFT)
    assert len(desk.keeper.names) == 7
    desk.keeper.carry_out(ReleaseClaim("t", "c"))
    assert len(desk.keeper.names) == 4
    desk.keeper.carry_out(ReleaseClaim("t", "soft"))
    assert len(desk.keeper.names) == 0 and not desk.keeper


def test_a_claim_that_loses_all_it_held_lets_go_of_the_shelf() -> None:
    """Nothing is locked for the dead, though the book has nothing left to unlock."""
    desk = Desk()
    turn = desk.turn(range(10))
    desk.claim(turn.turn, 10, id="hard")
    desk.claim(turn.turn, 10, id="soft", kind=ClaimKind.SOFT, priority=3)
    desk.keeper.lose(list(desk.shelf.cached.values()), "forgotten")
    assert desk.shelf.locks == desk.shelf.ranks == {}
    assert desk.status("hard").state is desk.status("soft").state is State.HARMED
    assert len(desk.keeper.names) == 0
    desk.keeper.passed_over([])


def test_claims_that_one_eviction_reached_are_told_of_it_as_one() -> None:
    """Each page once, and what is let go of is what was left."""
    desk = Desk()
    stem = list(range(10))
    first, second = desk.turn([*stem, 20, 21]), desk.turn([*stem, 30, 31])
    desk.claim(first.turn, 12, id="one", kind=ClaimKind.SOFT)
    desk.claim(second.turn, 12, id="two", kind=ClaimKind.SOFT)
    desk.evict(6)
    (fact,) = [event for event in desk.keeper.ledger if isinstance(event, Evicted)]
    gone = list(pages_of(fact.runs))
    assert len(gone) == len(set(gone)) == 6 and fact.request == "r"
    assert fact.free == desk.shelf.free()
    left = [e for e in desk.keeper.ledger if type(e).__name__ == "Unranked"]
    assert [list(pages_of(e.runs)) for e in left] == [[("t1", p) for p in range(8)]] * 2  # type: ignore[attr-defined]
    desk.keeper.gave_way([("t", "one")])
    assert desk.shelf.ranks == {}


def test_an_eviction_elsewhere_is_no_fact_about_a_claim() -> None:
    """Nothing of it is gone."""
    desk = Desk()
    turn = desk.turn(range(10))
    desk.claim(turn.turn, 6, kind=ClaimKind.SOFT, priority=2)
    desk.evict(3)
    desk.keeper.gave_way([("t", "c")])
    assert not any(isinstance(event, Evicted) for event in desk.keeper.ledger)
    assert desk.status().state is State.MATERIALIZED


def test_an_empty_cache_harms_all() -> None:
    """It names nothing."""
    desk = Desk()
    desk.claim(desk.turn(range(10)).turn, 10)
    desk.shelf.drop(list(desk.shelf.cached))
    desk.keeper.lose_all("flushed")
    assert desk.status().cause == "flushed" and desk.shelf.locks == {}
    (lost,) = [event for event in desk.keeper.ledger if isinstance(event, Lost)]
    assert lost.free == POOL
    desk.keeper.lose_all("flushed")
    assert len([event for event in desk.keeper.ledger if isinstance(event, Lost)]) == 1


def candidate(prompt: int, output: int = 5, tenant: str = "t") -> ArrivingRequest:
    """A request."""
    return ArrivingRequest("r", tenant, "s", "turn", prompt, output)


def test_what_is_cached_is_asked_for_only_near_the_limit() -> None:
    """It counts once, as the claim's."""
    desk = Desk()
    turn = desk.turn(range(60))
    desk.claim(turn.turn, 60)
    asked = 0

    def matched() -> Sequence[int]:
        nonlocal asked
        asked += 1
        return desk.shelf.cached_slots(turn.keys())

    assert desk.keeper.refuse(candidate(30), matched) is None
    assert asked == 0
    assert desk.keeper.refuse(candidate(90), matched) is None
    assert asked == 1
    assert not desk.keeper.blocks(candidate(90), matched)
    assert desk.keeper.blocks(candidate(90), list)
    before = desk.keeper.ledger.last
    assert desk.keeper.refuse(candidate(200), list) is None
    assert desk.keeper.ledger.last == before
    refusal = desk.keeper.refuse(candidate(90), list)
    assert refusal is not None and refusal.own == ("c",)
    assert desk.keeper.ledger.last == before + 2
    assert desk.status().pressure == 1


def test_hits_are_of_requests_that_find_all_of_a_claim() -> None:
    """A hit is in its session, as far as its end."""
    desk = Desk()
    turn = desk.turn(range(10))
    desk.claim(turn.turn, 8)
    keys = turn.keys()
    desk.keeper.matched(("t", "s"), keys, 7)
    desk.keeper.matched(("t", "z"), keys, 10)
    desk.keeper.matched(("t", "s"), array("q", [0, 1, 5, 6, 7, 8, 9, 9]), 8)
    assert desk.status().hits == 0
    desk.keeper.matched(("t", "s"), keys, 8)
    assert desk.status().hits == 1


def test_a_claim_follows_its_sessions_edits_alone() -> None:
    """Another session's splice of the same KV leaves it where it is."""
    desk = Desk()
    source = desk.turn(range(10))
    desk.claim(source.turn, 10, 6)
    tokens = [*range(3), *range(5, 10)]
    copies = [CopySegment(0, 5, 10, 3)]
    theirs = desk.turn(tokens, session="z", cut=3)
    desk.keeper.follow(theirs, [source], copies)
    assert desk.status().claim.predicate.source == source.turn
    mine = desk.turn(tokens, cut=3)
    desk.keeper.follow(mine, [source], copies)
    span = desk.status().claim.predicate
    assert (span.source, span.start, span.end) == (mine.turn, 4, 8)
    assert desk.shelf.locks == {("t", "c"): tuple(mine.keys()[:8])}
    assert len(desk.keeper.names) == 8


def test_a_demoted_claim_follows_nobody() -> None:
    """It gave up its promise where it was."""
    desk = Desk()
    source = desk.turn(range(10))
    desk.claim(source.turn, 10, 6)
    desk.keeper.carry_out(DemoteClaim("t", "c"))
    mine = desk.turn([*range(3), *range(5, 10)], cut=3)
    desk.keeper.follow(mine, [source], [CopySegment(0, 5, 10, 3)])
    assert desk.status().claim.predicate.source == source.turn
    assert desk.status().state is State.DEMOTED


def test_a_later_revision_takes_the_place_of_the_earlier_one() -> None:
    """Its locks too; an older one changes nothing."""
    desk = Desk()
    turn = desk.turn(range(10))
    desk.claim(turn.turn, 8)
    assert desk.claim(turn.turn, 5, revision=2).problem is None
    assert desk.shelf.locks == {("t", "c"): tuple(range(5))}
    problem = desk.claim(turn.turn, 9, revision=2).problem
    assert problem is not None and problem.code is ProblemCode.STALE_REVISION
    assert desk.claim(turn.turn, 9, revision=3, kind=ClaimKind.SOFT).problem is None
    assert desk.shelf.locks == {} and len(desk.keeper.names) == 9


@pytest.mark.parametrize(
    ("terms", "code", "field"),
    [
        ({"session": "never"}, ProblemCode.INVALID_CLAIM, "predicate.source"),
        ({"tenant": "u"}, ProblemCode.INVALID_CLAIM, "predicate.source"),
        ({"end": 11}, ProblemCode.INVALID_CLAIM, "predicate.end"),
        ({"end": 9}, ProblemCode.CLAIM_LIMIT, "share"),
    ],
)
def test_what_is_wrong_with_a_claim_is_said(
    terms: dict[str, Any], code: ProblemCode, field: str
) -> None:
    """Nothing is locked or named for it."""
    desk = Desk(share=0.08)
    turn = desk.turn(range(10))
    problem = desk.claim(turn.turn, terms.pop("end", 5), **terms).problem
    assert problem is not None and (problem.code, problem.field) == (code, field)
    assert desk.shelf.locks == {} and len(desk.keeper.names) == 0 and not desk.keeper


def test_tokens_that_are_not_there_fail_the_claim() -> None:
    """Its names go with it."""
    desk = Desk()
    turn = desk.turn(range(10))
    desk.shelf.evict(4)
    (found,) = desk.claim(turn.turn, 8).claims
    assert found.state is State.MATERIALIZATION_FAILED and found.cause == "6 of 8 pages resident"
    assert len(desk.keeper.names) == 0 and not desk.keeper


def test_foreign_and_unknown_claims_have_one_answer() -> None:
    """Every command that names one gets it."""
    desk = Desk()
    desk.claim(desk.turn(range(10)).turn, 8)
    for name, tenant in (("c", "u"), ("never", "t")):
        for command in (
            GetClaim(tenant, name),
            ReleaseClaim(tenant, name),
            DemoteClaim(tenant, name),
            GetClaimEvents(tenant, name),
        ):
            reply = desk.keeper.carry_out(command)
            assert reply.problem is not None
            assert reply.problem.code is ProblemCode.UNKNOWN_CLAIM
            assert reply.problem.message == "no claim has this id"
    assert desk.keeper.carry_out(ListClaims("u")).claims == ()
    assert len(desk.keeper.carry_out(ListClaims()).claims) == 1


def test_only_what_is_locked_can_be_demoted() -> None:
    """It can be demoted once."""
    desk = Desk()
    desk.claim(desk.turn(range(10)).turn, 8)
    assert desk.keeper.carry_out(DemoteClaim("t", "c")).problem is None
    problem = desk.keeper.carry_out(DemoteClaim("t", "c")).problem
    assert problem is not None and problem.code is ProblemCode.NOT_LOCKED


def test_an_empty_ledger_is_used_all_the_same() -> None:
    """A ledger without events is as false as an empty list."""
    ledger = EventLedger()
    desk = Desk()
    keeper = ClaimKeeper(desk.registry, desk.shelf, POOL, Arithmetic(1), ledger=ledger)
    assert keeper.ledger is ledger and ledger.last == 1


def test_a_claim_holds_the_pages_that_its_tokens_are_in() -> None:
    """Locks, names and status are of whole pages; a lost page is lost whole."""
    desk = Desk(4)
    turn = desk.turn(range(18))
    desk.claim(turn.turn, 15, 6)
    assert desk.shelf.locks == {("t", "c"): tuple(range(16))}
    assert desk.status().resident_tokens == desk.status().required_tokens == 12
    assert desk.keeper.book.protected_pages == len(desk.keeper.names) == 4
    desk.keeper.lose(desk.shelf.slots_of([tuple(range(12))]), "fault")
    assert desk.status().state is State.HARMED
    (lost,) = [event for event in desk.keeper.ledger if isinstance(event, Lost)]
    assert [run.pages for run in lost.runs] == [1]
    assert lost.free == (POOL - 16) // 4 + 1


@pytest.mark.parametrize(
    ("length", "start", "fix"),
    [(18, 16, "begin before 16, or claim a later turn"), (3, 0, "claim a later turn")],
)
def test_tokens_that_fill_no_page_are_refused_with_the_fix(
    length: int, start: int, fix: str
) -> None:
    """Nothing is remembered of the claim but its refusal."""
    desk = Desk(4)
    turn = desk.turn(range(length))
    problem = desk.claim(turn.turn, length, start).problem
    assert problem is not None
    assert (problem.code, problem.field) == (ProblemCode.INVALID_CLAIM, "predicate.start")
    assert problem.message.endswith(fix)
    assert desk.status().state is State.REJECTED and not desk.keeper


@pytest.mark.parametrize(("share", "required"), [(1.0, 12), (0.1, 8)])
def test_moved_tokens_require_another_page_as_far_as_limits_allow(
    share: float, required: int
) -> None:
    """They lay in two pages, and lie across three: of those, a claim at its limit has two."""
    desk = Desk(4, share=share, engine_share=1.0)
    source = desk.turn(range(22))
    desk.claim(source.turn, 16, 8)
    assert desk.status().required_tokens == 8
    mine = desk.turn([*range(2), *range(4, 22)], cut=4)
    desk.keeper.follow(mine, [source], [CopySegment(0, 4, 22, 2)])
    span = desk.status().claim.predicate
    assert (span.start, span.end) == (6, 14)
    assert desk.status().state is State.MATERIALIZED
    assert desk.status().required_tokens == desk.status().resident_tokens == required
    assert len(desk.shelf.locks["t", "c"]) == 4 + required


def test_what_an_edit_leaves_in_a_partial_page_is_lost_to_the_claim() -> None:
    """It is there, but nothing keeps it."""
    desk = Desk(4)
    source = desk.turn(range(16))
    desk.claim(source.turn, 16, 8)
    mine = desk.turn([*range(1), *range(14, 16)])
    desk.keeper.follow(mine, [source], [CopySegment(0, 14, 16, 1)])
    assert (desk.status().state, desk.status().cause) == (State.HARMED, "edited away")
    assert desk.shelf.locks == {}
