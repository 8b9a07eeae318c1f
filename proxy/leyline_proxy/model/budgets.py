"""Budgets: windows of time, what is used and held in them, and what is left. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, NamedTuple

Window = Literal["minute", "hour", "day", "month"]
Unit = Literal["tokens", "money"]

NANOS = 1_000_000_000
"""Money is counted in billionths of the currency, as whole numbers."""

_SECONDS: dict[Window, int] = {"minute": 60, "hour": 3600, "day": 86_400}
_DECEMBER = 12

SLOT_S = 300
_LEASE_SLOTS = 12
"""A hold lapses after an hour, in case that the process which has it was killed."""


class Amount(NamedTuple):
    """Tokens, and what they cost."""

    tokens: int = 0
    nanos: int = 0

    def plus(self, other: Amount) -> Amount:
        """Return the sum."""
        return Amount(self.tokens + other.tokens, self.nanos + other.nanos)

    def minus(self, other: Amount) -> Amount:
        """Return the difference, each part at least 0."""
        return Amount(max(0, self.tokens - other.tokens), max(0, self.nanos - other.nanos))


class Period(NamedTuple):
    """One window of the calendar."""

    window: Window
    begins: int
    ends: int
    """Seconds since 1970; the end is the next period's beginning."""


class WindowLimit(NamedTuple):
    """A tenant's limits in one kind of window."""

    window: Window
    tokens: int | None = None
    nanos: int | None = None

    def lowest(self, other: WindowLimit) -> WindowLimit:
        """Return the lower limits of both."""
        return WindowLimit(
            self.window, _lower(self.tokens, other.tokens), _lower(self.nanos, other.nanos)
        )


class Usage(NamedTuple):
    """Amounts of a tenant in a period: used, and held by its requests under way."""

    used: Amount = Amount()
    held: Amount = Amount()


class Counted(NamedTuple):
    """One process's counts of a tenant in a period, while the store is down."""

    learnt: Amount
    """What the store had counted when it was last asked."""
    owed: Amount
    """What was used since, and the store doesn't know yet."""
    held: Amount


class StoreState(NamedTuple):
    """The store of budgets, for operators."""

    problem: str | None
    """The reason that it isn't used; None if it is."""
    owed: int
    """Number of sums that wait for it."""


class Asked(NamedTuple):
    """A request's question for room in all of a tenant's budgets."""

    tenant: str
    limits: tuple[WindowLimit, ...]
    periods: tuple[Period, ...]
    amount: Amount
    slot: int
    """The present slot of time."""
    lapses: int
    """The slot in which the hold ends by itself."""
    forced: bool = False
    """True to hold the amount whatever is left."""


class Settlement(NamedTuple):
    """The end of a hold in one period, and what was used."""

    period: Period
    used: Amount
    held: Amount = Amount()
    lapses: int = 0
    """Slot of the hold; 0 if there is none."""


class Reserved(NamedTuple):
    """The answer to :class:`Asked`."""

    admitted: bool
    usages: tuple[Usage, ...]
    """By period; with the amount held, if it was admitted."""


@dataclass(frozen=True, slots=True)
class Standing:
    """One unit of one budget."""

    unit: Unit
    period: Period
    limit: int
    """Tokens, or billionths of the currency, as are the next two."""
    used: int
    held: int

    @property
    def remaining(self) -> int:
        """Amount that may still be used or held."""
        return max(0, self.limit - self.used - self.held)

    def lacks(self, wanted: Amount) -> bool:
        """Return True if ``wanted`` doesn't fit."""
        return self.used + self.held + _part(wanted, self.unit) > self.limit

    def never_fits(self, wanted: Amount) -> bool:
        """Return True if ``wanted`` exceeds the whole budget."""
        return _part(wanted, self.unit) > self.limit

    def fits_once_released(self, wanted: Amount) -> bool:
        """Return True if ``wanted`` fits as soon as requests under way have ended."""
        return self.used + _part(wanted, self.unit) <= self.limit


def period_at(window: Window, now: float) -> Period:
    """Return the period of the calendar that holds ``now``, in UTC."""
    if window != "month":
        length = _SECONDS[window]
        begins = int(now // length) * length
        return Period(window, begins, begins + length)
    moment = datetime.fromtimestamp(now, UTC)
    first = datetime(moment.year, moment.month, 1, tzinfo=UTC)
    years, months = (1, 1) if moment.month == _DECEMBER else (0, moment.month + 1)
    after = datetime(moment.year + years, months, 1, tzinfo=UTC)
    return Period(window, int(first.timestamp()), int(after.timestamp()))


def asked_at(
    tenant: str, limits: Sequence[WindowLimit], amount: Amount, now: float, *, forced: bool = False
) -> Asked:
    """Return the question for ``amount`` at a time."""
    slot = int(now // SLOT_S)
    periods = tuple(period_at(limit.window, now) for limit in limits)
    return Asked(tenant, tuple(limits), periods, amount, slot, slot + _LEASE_SLOTS, forced)


def settlements_of(asked: Asked, used: Amount) -> list[Settlement]:
    """Return the settlements of what a request holds, one for each period."""
    return [Settlement(period, used, asked.amount, asked.lapses) for period in asked.periods]


def fits(asked: Asked, usages: Sequence[Usage]) -> bool:
    """Return True if all budgets have room for the amount."""
    return not any(each.lacks(asked.amount) for each in standings(asked, usages))


def shortage(asked: Asked, usages: Sequence[Usage]) -> Standing | None:
    """Return the budget without room that is the last to have some; None if all have room."""
    short = [each for each in standings(asked, usages) if each.lacks(asked.amount)]
    return max(
        short,
        key=lambda each: (not each.fits_once_released(asked.amount), each.period.ends),
        default=None,
    )


def standings(asked: Asked, usages: Sequence[Usage]) -> list[Standing]:
    """Return the state of each budget."""
    found = []
    for limit, period, usage in zip(asked.limits, asked.periods, usages, strict=True):
        if limit.tokens is not None:
            counts = usage.used.tokens, usage.held.tokens
            found.append(Standing("tokens", period, limit.tokens, *counts))
        if limit.nanos is not None:
            counts = usage.used.nanos, usage.held.nanos
            found.append(Standing("money", period, limit.nanos, *counts))
    return found


def together(counts: Sequence[Sequence[Counted]]) -> list[Usage]:
    """Return the usage by period that several processes have counted while the store was down.

    Args:
        counts: by process, then by period.
    """
    found = []
    for of_period in zip(*counts, strict=True):
        # Usage only grows: the process that asked last has learnt the most.
        used = max((each.learnt for each in of_period), default=Amount())
        held = Amount()
        for each in of_period:
            used, held = used.plus(each.owed), held.plus(each.held)
        found.append(Usage(used, held))
    return found


def tightest(found: Sequence[Standing], unit: Unit) -> Standing | None:
    """Return the budget of a unit with the least left; None if there is none."""
    return min(
        (each for each in found if each.unit == unit),
        key=lambda each: (each.remaining, -each.period.ends),
        default=None,
    )


def _part(amount: Amount, unit: Unit) -> int:
    return amount.tokens if unit == "tokens" else amount.nanos


def _lower(one: int | None, other: int | None) -> int | None:
    given = [each for each in (one, other) if each is not None]
    return min(given, default=None)
