"""The keeper over a naive cache: what it has the cache do, and what it tells of it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from leyline_engine.claims.events import EventLedger, Evicted, Lost
from leyline_engine.claims.feasibility import Arithmetic
from leyline_engine.claims.keeper import Candidate, ClaimKeeper
from leyline_engine.claims.limits import Limits
from leyline_engine.claims.protection import ClaimKey
from leyline_engine.claims.runs import pages_of
from leyline_engine.claims.states import FINAL, State
from leyline_engine.contract import (
    Claim,
    ClaimKind,
    ClaimReply,
    ClaimStatus,
    CopySegment,
    DemoteClaim,
    GetClaim,
    GetClaimEvents,
    LineageRun,
    ListClaims,
    Predicate,
    ProblemCode,
    ReleaseClaim,
    SubmitClaim,
)
from leyline_engine.sources import SourceRegistry, SourceTurn

Prefix = tuple[int, ...]
POOL = 100
ALL = Limits(share=1.0, engine_share=1.0)


class NaiveShelf:
    """A slot for each cached prefix; slots are used again."""

    def __init__(self) -> None:
        self.cached: dict[Prefix, int] = {}
        self.locks: dict[ClaimKey, Prefix] = {}
        self.ranks: dict[ClaimKey, tuple[Prefix, int]] = {}
        self.empty = list(range(POOL))

    def fill(self, keys: Sequence[int]) -> None:
        """Cache a sequence."""
        for end in range(1, len(keys) + 1):
            prefix = tuple(keys[:end])
            if prefix not in self.cached:
                self.cached[prefix] = self.empty.pop(0)

    def _path(self, keys: array[int]) -> Prefix:
        end = 0
        while end < len(keys) and tuple(keys[: end + 1]) in self.cached:
            end += 1
        return tuple(keys[:end])

    def slots(self, keys: array[int]) -> Sequence[int]:
        """Slots of the cached prefix."""
        path = self._path(keys)
        return [self.cached[path[:end]] for end in range(1, len(path) + 1)]

    def lock(self, claim: ClaimKey, keys: array[int]) -> None:
        """All of it must be there."""
        assert claim not in self.locks and self._path(keys) == tuple(keys)
        self.locks[claim] = tuple(keys)

    def unlock(self, claim: ClaimKey) -> None:
        """Also of claims that hold none."""
        self.locks.pop(claim, None)

    def rank(self, claim: ClaimKey, keys: array[int], priority: int) -> None:
        """What there is of it."""
        assert claim not in self.ranks
        self.ranks[claim] = (self._path(keys), priority)

    def unrank(self, claim: ClaimKey) -> None:
        """Also of claims that hold none."""
        self.ranks.pop(claim, None)

    def free(self) -> int:
        """Slots that nobody has."""
        return len(self.empty)

    def locked(self) -> set[Prefix]:
        """Prefixes that claims lock."""
        return {path[:end] for path in self.locks.values() for end in range(1, len(path) + 1)}

    def rank_of(self, prefix: Prefix) -> int:
        """Its highest priority."""
        found = (p for path, p in self.ranks.values() if path[: len(prefix)] == prefix)
        return max(found, default=0)

    def drop(self, prefixes: Sequence[Prefix]) -> None:
        """These are gone."""
        for prefix in prefixes:
            self.empty.append(self.cached.pop(prefix))

    def evict(self, amount: int) -> list[ClaimKey]:
        """Leaves, the lowest rank first; the claims that lost any."""
        hit: dict[ClaimKey, None] = {}
        for _ in range(amount):
            leaves = [
                prefix
                for prefix in self.cached.keys() - self.locked()
                if not any(p[:-1] == prefix for p in self.cached)
            ]
            if not leaves:
                break
            gone = min(leaves, key=lambda leaf: (self.rank_of(leaf), leaf))
            hit |= dict.fromkeys(
                k for k, (path, _) in self.ranks.items() if path[: len(gone)] == gone
            )
            self.drop([gone])
        return list(hit)


class Desk:
    """A keeper, its shelf and its turns."""

    def __init__(self, **limits: Any) -> None:
        self.shelf = NaiveShelf()
        self.registry = SourceRegistry()
        limit = Limits(**limits) if limits else ALL
        arithmetic = Arithmetic(1, strict=False)
        self.keeper = ClaimKeeper(self.registry, self.shelf, POOL, arithmetic, limits=limit)
        self._names = count(1)

    def turn(
        self,
        tokens: Sequence[int],
        *,
        session: str = "s",
        tenant: str = "t",
        cut: int | None = None,
    ) -> SourceTurn:
        """Retain a turn; all but its last token has KV. From ``cut`` on it is spliced."""
        name = f"t{next(self._names)}"
        lineage = () if cut is None else (LineageRun(cut, f"of {name}"),)
        turn = SourceTurn(name, array("q", [*tokens, 77]), "", lineage, tenant, session)
        self.registry.retain((tenant, session), turn)
        self.shelf.fill(turn.keys()[:-1])
        return turn

    def claim(self, source: str, end: int, start: int = 0, **terms: Any) -> ClaimReply:
        """Claim tokens of a turn, hard unless terms say otherwise."""
        share = terms.pop("share", 1.0)
        given = {"id": "c", "tenant": "t", "session": "s", "kind": ClaimKind.HARD} | terms
        claim = Claim(predicate=Predicate(source, start, end, share), **given)
        return self.keeper.carry_out(SubmitClaim(claim))

    def status(self, name: str = "c", tenant: str = "t") -> ClaimStatus:
        """Where a claim stands."""
        return self.keeper.book.status(tenant, name)

    def evict(self, amount: int) -> None:
        """Evict, and tell the keeper."""
        self.keeper.all_gave_way(self.shelf.evict(amount), "r")


def test_a_hard_claim_locks_what_it_needs_and_what_that_stands_on() -> None:
    """No token behind it."""
    desk = Desk()
    turn = desk.turn(range(10))
    desk.claim(turn.turn, 8, 4, share=0.5)
    assert desk.shelf.locks == {("t", "c"): tuple(range(6))}
    assert desk.status().resident_tokens == 2
    desk.keeper.carry_out(DemoteClaim("t", "c"))
    assert desk.shelf.locks == {}
    assert desk.shelf.ranks == {("t", "c"): (tuple(range(6)), 0)}


def test_what_no_claim_holds_has_no_name() -> None:
    """Neither the rest of a span, nor what stands before a soft one."""
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
    desk.keeper.gave_way(("t", "one"))
    assert desk.shelf.ranks == {}


def test_an_eviction_elsewhere_is_no_fact_about_a_claim() -> None:
    """Nothing of it is gone."""
    desk = Desk()
    turn = desk.turn(range(10))
    desk.claim(turn.turn, 6, kind=ClaimKind.SOFT, priority=2)
    desk.evict(3)
    desk.keeper.gave_way(("t", "c"))
    assert not any(isinstance(event, Evicted) for event in desk.keeper.ledger)
    assert desk.status().state is State.MATERIALIZED


def test_an_empty_cache_harms_all() -> None:
    """And names nothing."""
    desk = Desk()
    desk.claim(desk.turn(range(10)).turn, 10)
    desk.shelf.drop(list(desk.shelf.cached))
    desk.keeper.lose_all("flushed")
    assert desk.status().cause == "flushed" and desk.shelf.locks == {}
    (lost,) = [event for event in desk.keeper.ledger if isinstance(event, Lost)]
    assert lost.free == POOL
    desk.keeper.lose_all("flushed")
    assert len([event for event in desk.keeper.ledger if isinstance(event, Lost)]) == 1


def candidate(prompt: int, output: int = 5, tenant: str = "t") -> Candidate:
    """A request."""
    return Candidate("r", tenant, "s", "turn", prompt, output)


def test_what_is_cached_is_asked_for_only_near_the_limit() -> None:
    """And counts once, as the claim's."""
    desk = Desk()
    turn = desk.turn(range(60))
    desk.claim(turn.turn, 60)
    asked = 0

    def matched() -> Sequence[int]:
        nonlocal asked
        asked += 1
        return desk.shelf.slots(turn.keys())

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
    """In its session, as far as its end."""
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
    """To every command that names one."""
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
    """Once."""
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


KEYS = st.lists(st.integers(0, 2), min_size=1, max_size=8)
NAMES = st.sampled_from(["c1", "c2", "c3", "c4"])


class KeeperMachine(RuleBasedStateMachine):
    """Turns, claims, evictions and losses at random."""

    def __init__(self) -> None:
        super().__init__()
        self.desk = Desk()
        self.turns: list[SourceTurn] = []
        self.revision = self.ticks = 0
        self.known: set[str] = set()

    @precondition(lambda self: self.desk.shelf.free() > 12)
    @rule(tokens=KEYS, session=st.sampled_from("sz"))
    def turn(self, tokens: list[int], session: str) -> None:
        """Sessions share what they begin with."""
        self.turns = [*self.turns, self.desk.turn(tokens, session=session)][-6:]

    @precondition(lambda self: self.turns and self.desk.shelf.free() > 12)
    @rule(which=st.integers(0, 5), start=st.integers(0, 7), length=st.integers(1, 4))
    def edit(self, which: int, start: int, length: int) -> None:
        """A part of a turn is cut out, what is behind it copied."""
        source = self.turns[which % len(self.turns)]
        whole = list(source.tokens[:-1])
        end = min(start + length, len(whole))
        if source.lineage or start >= end or len(self.desk.shelf.slots(source.keys())) < len(whole):
            return
        copies = [CopySegment(0, end, len(whole), start)]
        cut = start if copies[0].length else None
        turn = self.desk.turn([*whole[:start], *whole[end:], 5], session=source.session, cut=cut)
        self.turns = [*self.turns, turn][-6:]
        self.desk.keeper.follow(turn, [source], copies)

    @precondition(lambda self: self.turns)
    @rule(
        which=st.integers(0, 5),
        name=NAMES,
        start=st.integers(0, 8),
        length=st.integers(1, 8),
        share=st.sampled_from([0.4, 1.0, 1.0]),
        kind=st.sampled_from(ClaimKind),
        priority=st.integers(0, 2),
        ttl_s=st.none() | st.integers(1, 3),
    )
    def claim(self, which: int, name: str, start: int, length: int, **terms: Any) -> None:
        """New, or a revision."""
        turn = self.turns[which % len(self.turns)]
        size = len(turn.tokens) - 1
        start %= size
        self.revision += 1
        self.known.add(name)
        end = min(start + length, size)
        terms |= {"session": turn.session, "revision": self.revision}
        self.desk.claim(turn.turn, end, start, id=name, **terms)

    @rule(name=NAMES, demote=st.booleans())
    def let_go(self, name: str, demote: bool) -> None:
        """Of locks, or of all."""
        command = DemoteClaim("t", name) if demote else ReleaseClaim("t", name)
        self.desk.keeper.carry_out(command)

    @rule(amount=st.integers(1, 8))
    def evict(self, amount: int) -> None:
        """What nobody locks."""
        self.desk.evict(amount)

    @precondition(lambda self: self.desk.shelf.cached)
    @rule(which=st.integers(0, 99))
    def lose(self, which: int) -> None:
        """A prefix and all behind it, whoever locks it."""
        shelf = self.desk.shelf
        top = sorted(shelf.cached)[which % len(shelf.cached)]
        gone = [prefix for prefix in shelf.cached if prefix[: len(top)] == top]
        self.desk.keeper.lose([shelf.cached[prefix] for prefix in gone], "fault")
        assert not shelf.locked() & set(gone)
        shelf.drop(gone)

    @rule(seconds=st.integers(0, 2))
    def tick(self, seconds: int) -> None:
        """Time goes on."""
        self.ticks += 1
        keeper = self.desk.keeper
        keeper.tick(self.ticks, keeper.book.now_ms + 1000 * seconds)

    @invariant()
    def the_shelf_holds_what_the_book_says(self) -> None:
        """As many locked tokens, and names for what is held alone."""
        keeper, shelf = self.desk.keeper, self.desk.shelf
        live = {(s.claim.tenant, s.claim.id): s for s in keeper.book.live()}
        assert len(shelf.locked()) == keeper.book.protected_pages
        assert shelf.locks.keys() | shelf.ranks.keys() == live.keys()
        held = {page for key in live for page in pages_of(keeper.book.held(key))}
        assert len(keeper.names) == len(held)
        assert set(pages_of(keeper.names.known(shelf.cached.values()))) == held
        assert bool(keeper) is bool(live)

    @invariant()
    def promises_are_kept(self) -> None:
        """A live claim has what it requires, and a locked one all that it locked."""
        for status in self.desk.keeper.book.live():
            assert status.resident_tokens >= status.required_tokens
        assert self.desk.shelf.locked() <= self.desk.shelf.cached.keys()

    def teardown(self) -> None:
        """Everything ends, and nothing is held or named for it."""
        for name in self.known:
            self.desk.keeper.carry_out(ReleaseClaim("t", name))
            assert self.desk.status(name).state in FINAL
        assert self.desk.shelf.locks == self.desk.shelf.ranks == {}
        assert len(self.desk.keeper.names) == 0 and not self.desk.keeper


def test_the_keeper_holds_neither_more_nor_less_than_it_promised() -> None:
    """Whatever comes and goes."""
    run_state_machine_as_test(
        KeeperMachine, settings=settings(max_examples=150, stateful_step_count=40, deadline=None)
    )
