"""The arithmetic of budgets: windows of the calendar, and what fits."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_proxy.model.budgets import (
    Amount,
    Usage,
    Window,
    WindowLimit,
    asked_at,
    fits,
    period_at,
    shortage,
    standings,
    tightest,
)

MOMENTS = st.datetimes(datetime(1971, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC))
WINDOWS: tuple[Window, ...] = ("minute", "hour", "day", "month")


def truncated(moment: datetime, window: Window) -> datetime:
    """A period's beginning, by the calendar of the standard library."""
    parts = {"month": {"day": 1, "hour": 0}, "day": {"hour": 0}}
    return moment.replace(
        **{"minute": moment.minute if window == "minute" else 0, "second": 0, "microsecond": 0},
        **parts.get(window, {}),
    )


@given(MOMENTS, st.sampled_from(WINDOWS))
def test_a_period_is_that_of_the_calendar(moment: datetime, window: Window) -> None:
    """It holds its moment, begins as the calendar says, and the next one begins at its end."""
    period = period_at(window, moment.timestamp())
    assert period.begins <= moment.timestamp() < period.ends
    assert period.begins == truncated(moment, window).timestamp()
    after = period_at(window, period.ends)
    assert after.begins == period.ends
    assert period_at(window, period.ends - 1) == period


@given(MOMENTS)
def test_a_month_ends_where_its_last_day_does(moment: datetime) -> None:
    """Months of all lengths, leap years included."""
    last = datetime.fromtimestamp(period_at("month", moment.timestamp()).ends - 1, UTC)
    assert (last.year, last.month) == (moment.year, moment.month)
    assert (last + timedelta(seconds=1)).day == 1


def test_a_limit_may_be_reached_but_not_exceeded() -> None:
    """The last token fits, the next one doesn't; so does the last billionth."""
    limits = (WindowLimit("day", tokens=10, nanos=100),)
    usage = (Usage(Amount(6, 60), Amount(1, 10)),)
    assert fits(asked_at("red", limits, Amount(3, 30), 0), usage)
    assert not fits(asked_at("red", limits, Amount(4, 0), 0), usage)
    assert not fits(asked_at("red", limits, Amount(0, 31), 0), usage)


def test_the_budget_that_keeps_a_request_longest_is_named() -> None:
    """Of a minute and a month without room the month; unless only requests under way fill it."""
    limits = (WindowLimit("minute", tokens=5), WindowLimit("month", tokens=50))
    asked = asked_at("red", limits, Amount(10, 0), 0)
    full = shortage(asked, (Usage(Amount(5)), Usage(Amount(50))))
    assert full is not None
    assert full.period.window == "month"
    held = shortage(asked, (Usage(Amount(5)), Usage(Amount(), Amount(50))))
    assert held is not None
    assert held.period.window == "minute"
    assert shortage(asked_at("red", limits, Amount(1), 0), (Usage(), Usage())) is None


def test_a_budget_without_a_limit_of_a_unit_has_no_standing_in_it() -> None:
    """Tokens without a limit are counted by nobody."""
    asked = asked_at("red", (WindowLimit("day", nanos=5),), Amount(10**12), 0)
    found = standings(asked, (Usage(),))
    assert [each.unit for each in found] == ["money"]
    assert tightest(found, "tokens") is None
    assert fits(asked, (Usage(),))


@pytest.mark.parametrize("limits", [(7, None), (None, 7), (7, 9), (9, 7)])
def test_the_lower_limit_of_two_holds(limits: tuple[int | None, int | None]) -> None:
    """None is no limit."""
    one, other = (WindowLimit("day", tokens=each) for each in limits)
    assert one.lowest(other).tokens == 7
