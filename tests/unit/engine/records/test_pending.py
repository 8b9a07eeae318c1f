"""Forgets that wait: every slot is counted once, and every ticket comes to its end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from leyline_engine.contract import ForgetCounts
from leyline_engine.records.pending import PendingForgets

TICKETS, HOLDERS = ("one", "two"), ("h", "i", "j")
COUNTS = st.integers(1, 9)
STEPS = st.one_of(
    st.tuples(st.just("open"), st.sampled_from(TICKETS), COUNTS),
    st.tuples(st.just("wait"), st.sampled_from(TICKETS), st.sampled_from(HOLDERS), COUNTS),
    st.tuples(st.just("let_go"), st.lists(st.sampled_from(HOLDERS), max_size=2)),
    st.tuples(st.just("settle")),
    st.tuples(st.just("take")),
)


class Judge:
    """Slots by who has them: held, given back and not yet overwritten, or overwritten."""

    def __init__(self) -> None:
        self.held: dict[str, dict[str, int]] = defaultdict(dict)
        self.given_back: dict[str, int] = defaultdict(int)
        self.reached: dict[str, tuple[int, int]] = {}
        """Overwritten and shared, by open ticket."""

    def let_go(self, holders: Iterable[str]) -> None:
        """Mark the slots that these held to be overwritten next."""
        for holder in holders:
            for ticket, count in self.held.pop(holder, {}).items():
                self.given_back[ticket] += count

    def settle(self) -> None:
        """All of that was overwritten."""
        for ticket, (overwritten, shared) in self.reached.items():
            self.reached[ticket] = (overwritten + self.given_back[ticket], shared)
        self.given_back.clear()

    def pending(self, ticket: str) -> int:
        """The slots that a ticket waits for."""
        return sum(each.get(ticket, 0) for each in self.held.values()) + self.given_back[ticket]

    def check(self, told: dict[str, ForgetCounts]) -> None:
        """Check that the last report of each open ticket is so; a ticket that waits for nothing
        ends."""
        for ticket, reached in [*self.reached.items()]:
            assert told[ticket] == ForgetCounts(*reached, self.pending(ticket))
            if not self.pending(ticket):
                del self.reached[ticket]


@given(st.lists(STEPS, max_size=20))
def test_a_ticket_ends_when_all_that_waits_for_it_was_overwritten(steps: list[Any]) -> None:
    """In any order, a slot is pending until it is overwritten and counts once, and every change is
    reported, the last of them with nothing pending."""
    forgets, judge = PendingForgets(), Judge()
    told: dict[str, ForgetCounts] = {}
    for name, *rest in [*steps, ("let_go", HOLDERS), ("settle",), ("take",)]:
        if name == "open" and rest[0] not in judge.reached:
            judge.reached[rest[0]] = (rest[1], rest[1] + 1)
            told[rest[0]] = forgets.open(rest[0], rest[1], rest[1] + 1)
        elif name == "wait":
            forgets.wait(*rest)
            ticket, holder, count = rest
            judge.held[holder][ticket] = count
        elif name == "let_go":
            forgets.let_go(rest[0])
            judge.let_go(rest[0])
        elif name == "settle":
            forgets.settle()
            judge.settle()
        elif name == "take":
            told |= forgets.take()
            judge.check(told)
    assert not judge.reached
    assert forgets.take() == {}
