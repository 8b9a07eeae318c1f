"""The keeper under turns, edits, claims, evictions and losses at random."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from keeper_kit import Desk
from support.examples import examples

from leyline_engine.admit.plan import page_floor
from leyline_engine.claims.runs import pages_of
from leyline_engine.claims.states import FINAL
from leyline_engine.contract import (
    ClaimKind,
    CopySegment,
    DemoteClaim,
    ReleaseClaim,
)
from leyline_engine.records.sources import SourceTurn

KEYS = st.lists(st.integers(0, 2), min_size=1, max_size=8)
NAMES = st.sampled_from(["c1", "c2", "c3", "c4"])


class KeeperMachine(RuleBasedStateMachine):
    """Turns, claims, evictions and losses at random."""

    page = 1

    def __init__(self) -> None:
        super().__init__()
        self.desk = Desk(self.page)
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
        """Cut out a part of a turn and copy the rest after it."""
        source = self.turns[which % len(self.turns)]
        whole = list(source.tokens[:-1])
        end = min(start + length, len(whole))
        cached = page_floor(len(whole), self.page)
        held = len(self.desk.shelf.cached_slots(source.keys()))
        if source.lineage or start >= end or held < cached:
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
        """Evict pages that nothing locks."""
        self.desk.evict(amount)

    @precondition(lambda self: self.desk.shelf.cached)
    @rule(which=st.integers(0, 99))
    def lose(self, which: int) -> None:
        """Lose a prefix and all that follows it, whoever locks it."""
        shelf = self.desk.shelf
        top = sorted(shelf.cached)[which % len(shelf.cached)]
        gone = [prefix for prefix in shelf.cached if prefix[: len(top)] == top]
        self.desk.keeper.lose(shelf.slots_of(gone), "fault")
        assert not shelf.locked() & set(gone)
        shelf.drop(gone)

    @rule(seconds=st.integers(0, 2))
    def tick(self, seconds: int) -> None:
        """Let time pass."""
        self.ticks += 1
        keeper = self.desk.keeper
        keeper.tick(self.ticks, keeper.book.now_ms + 1000 * seconds)

    @invariant()
    def the_shelf_holds_what_the_book_says(self) -> None:
        """The shelf has as many locked pages, and names for pages that it alone holds."""
        keeper, shelf = self.desk.keeper, self.desk.shelf
        live = {(s.claim.tenant, s.claim.id): s for s in keeper.book.live()}
        assert len(shelf.locked()) == keeper.book.protected_pages
        assert shelf.locks.keys() | shelf.ranks.keys() == live.keys()
        held = {page for key in live for page in pages_of(keeper.book.held(key))}
        assert len(keeper.names) == len(held)
        assert set(pages_of(keeper.names.known(shelf.slots_of(shelf.cached)))) == held
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
    """This holds whatever comes and goes."""
    run_state_machine_as_test(
        KeeperMachine,
        settings=settings(max_examples=examples(150), stateful_step_count=40, deadline=None),
    )


class PagedKeeperMachine(KeeperMachine):
    """The same with pages of three tokens."""

    page = 3


def test_the_keeper_holds_neither_more_nor_less_pages_than_it_promised() -> None:
    """This holds where pages come and go whole, and turns end within one."""
    run_state_machine_as_test(
        PagedKeeperMachine,
        settings=settings(max_examples=examples(100), stateful_step_count=40, deadline=None),
    )
