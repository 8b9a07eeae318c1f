"""The book of budgets: no sequence of requests exceeds a limit by more than was promised."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from leyline_proxy.budgets.book import Book
from leyline_proxy.budgets.owed import OwedSettlements
from leyline_proxy.model.budgets import (
    SLOT_S,
    Amount,
    Asked,
    Settlement,
    WindowLimit,
    asked_at,
    period_at,
)

LIMITS = (WindowLimit("minute", tokens=100, nanos=1000), WindowLimit("day", tokens=400))
DAY = period_at("day", 0)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "settle", "wait", "lose"]),
        st.integers(0, 60),
        st.integers(0, 60),
        st.sampled_from(["red", "blue"]),
    ),
    max_size=60,
)


@dataclass
class Under:
    """A request under way."""

    asked: Asked

    def settlements(self, used: Amount) -> list[Settlement]:
        """The request's end."""
        asked = self.asked
        return [Settlement(each, used, asked.amount, asked.lapses) for each in asked.periods]


@given(STEPS)
def test_usage_exceeds_a_limit_by_no_more_than_answers_exceed_their_reservations(
    steps: list[tuple[str, int, int, str]],
) -> None:
    """In every window, for every tenant, in any order; what is held is what is under way."""
    book, now, running = Book(), 0.0, list[Under]()
    excess: dict[tuple[str, object], int] = {}
    used: dict[tuple[str, object], int] = {}
    for act, number, more, tenant in steps:
        if act == "wait":
            now += number
        elif act == "reserve":
            asked = asked_at(tenant, LIMITS, Amount(number, number), now)
            if book.reserve(asked, now).admitted:
                running.append(Under(asked))
        elif running:
            ended = running.pop(number % len(running))
            # A request that was lost is charged nothing.
            real = 0 if act == "lose" else more
            book.settle(ended.asked.tenant, ended.settlements(Amount(real, real)), now)
            for period in ended.asked.periods:
                key = (ended.asked.tenant, period)
                excess[key] = excess.get(key, 0) + max(0, real - ended.asked.amount.tokens)
                used[key] = used.get(key, 0) + real
        for name in ("red", "blue"):
            asked = asked_at(name, LIMITS, Amount(), now)
            for limit, period, usage in zip(LIMITS, asked.periods, book.usages(asked), strict=True):
                key = (name, period)
                under_way = sum(
                    each.asked.amount.tokens
                    for each in running
                    if each.asked.tenant == name and period in each.asked.periods
                )
                assert usage.used.tokens == used.get(key, 0)
                assert usage.held.tokens == under_way
                assert limit.tokens is not None
                assert usage.used.tokens + under_way <= limit.tokens + excess.get(key, 0)


def test_a_window_begins_empty() -> None:
    """At the minute's end its budget is full again; the day's isn't."""
    book, limits = Book(), (WindowLimit("minute", tokens=10), WindowLimit("day", tokens=15))
    first = asked_at("red", limits, Amount(10), 59.9)
    assert book.reserve(first, 59.9).admitted
    book.settle("red", Under(first).settlements(Amount(10)), 59.95)
    assert not book.reserve(asked_at("red", limits, Amount(1), 59.95), 59.95).admitted
    assert book.reserve(asked_at("red", limits, Amount(5), 60.0), 60.0).admitted
    assert not book.reserve(asked_at("red", limits, Amount(1), 60.0), 60.0).admitted


def test_a_refused_request_holds_nothing_anywhere() -> None:
    """The window that has room gets no hold, if another one has none."""
    book, limits = Book(), (WindowLimit("minute", tokens=100), WindowLimit("day", tokens=5))
    assert not book.reserve(asked_at("red", limits, Amount(10), 0), 0).admitted
    usages = book.usages(asked_at("red", limits, Amount(), 0))
    assert [each.held for each in usages] == [Amount(), Amount()]


def test_a_hold_lapses_after_an_hour() -> None:
    """A process that was killed doesn't keep room for the rest of the day."""
    book, limits = Book(), (WindowLimit("day", tokens=10),)
    asked = asked_at("red", limits, Amount(10), 0)
    assert book.reserve(asked, 0).admitted
    assert not book.reserve(asked_at("red", limits, Amount(1), 3599 - SLOT_S), 0).admitted
    later = 3600.0
    assert book.reserve(asked_at("red", limits, Amount(9), later), later).admitted
    # Its late end gives back nothing that isn't its own.
    book.settle("red", Under(asked).settlements(Amount(1)), later)
    (usage,) = book.usages(asked_at("red", limits, Amount(), later))
    assert usage == (Amount(1), Amount(9))


def test_a_forced_request_is_admitted_and_counts() -> None:
    """The rest of a request that has begun holds room beyond the limit."""
    book, limits = Book(), (WindowLimit("day", tokens=10),)
    reserved = book.reserve(asked_at("red", limits, Amount(11), 0, forced=True), 0)
    assert reserved.admitted
    assert reserved.usages[0].held == Amount(11)
    assert not book.reserve(asked_at("red", limits, Amount(1), 0), 0).admitted


def test_the_book_forgets_windows_that_have_ended() -> None:
    """A hundred days of minutes leave the pages of the present windows."""
    book = Book()
    for day in range(100):
        now = day * 86_400.0
        book.reserve(asked_at("red", LIMITS, Amount(1), now), now)
    assert len(book) == len(LIMITS)
    late = Settlement(DAY, Amount(5))
    book.settle("red", [late], 99 * 86_400.0)
    assert len(book) == len(LIMITS)


@given(st.lists(st.tuples(st.sampled_from(["red", "blue"]), st.integers(0, 9)), max_size=30))
def test_what_is_owed_is_the_sum_of_what_was_used(charges: list[tuple[str, int]]) -> None:
    """By tenant, once; what is taken isn't owed any more."""
    owed = OwedSettlements()
    for tenant, tokens in charges:
        owed.add(tenant, [Settlement(DAY, Amount(tokens))], 0)
    for tenant in ("red", "blue"):
        expected = sum(tokens for name, tokens in charges if name == tenant)
        assert owed.used(tenant, DAY).tokens == expected
        assert sum(each.used.tokens for each in owed.take(tenant, 0)) == expected
        assert owed.used(tenant, DAY) == Amount()
    assert len(owed) == 0
