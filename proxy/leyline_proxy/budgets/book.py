"""Usage by tenant and period, in memory. Pure: the caller passes the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..model.budgets import Amount, Asked, Period, Reserved, Settlement, Usage, fits


@dataclass(slots=True)
class _Page:
    """One tenant's usage in one period."""

    used: Amount = field(default_factory=Amount)
    holds: dict[int, Amount] = field(default_factory=dict)
    """What is held, by the slot in which it lapses."""

    def usage(self, slot: int) -> Usage:
        """Return the usage, without holds that have lapsed by ``slot``."""
        for lapsed in [each for each in self.holds if each <= slot]:
            del self.holds[lapsed]
        held = Amount()
        for each in self.holds.values():
            held = held.plus(each)
        return Usage(self.used, held)


class Book:
    """Counts usage. What is used in a period that has ended is dropped.

    A tenant has one page for each of its windows, so the book is as large as the settings."""

    def __init__(self) -> None:
        self._pages: dict[tuple[str, Period], _Page] = {}
        self._tidied = 0

    def __len__(self) -> int:
        return len(self._pages)

    def reserve(self, asked: Asked, now: float) -> Reserved:
        """Hold the amount in all periods, if all have room for it, or it is forced."""
        self._tidy(now)
        usages = self.usages(asked)
        if not asked.forced and not fits(asked, usages):
            return Reserved(False, usages)
        for period in asked.periods:
            holds = self._page(asked.tenant, period).holds
            holds[asked.lapses] = holds.get(asked.lapses, Amount()).plus(asked.amount)
        return Reserved(True, self.usages(asked))

    def settle(self, tenant: str, settlements: Sequence[Settlement], now: float) -> None:
        """End holds, and add what was used."""
        for each in settlements:
            if each.period.ends <= now:
                continue
            page = self._page(tenant, each.period)
            page.used = page.used.plus(each.used)
            if each.lapses in page.holds:
                page.holds[each.lapses] = page.holds[each.lapses].minus(each.held)

    def learn(self, tenant: str, period: Period, used: Amount) -> None:
        """Note what is used, from a store that knows more."""
        self._page(tenant, period).used = used

    def usages(self, asked: Asked) -> tuple[Usage, ...]:
        """Return the usage by period."""
        pages = [self._pages.get((asked.tenant, period)) for period in asked.periods]
        return tuple(Usage() if page is None else page.usage(asked.slot) for page in pages)

    def _page(self, tenant: str, period: Period) -> _Page:
        return self._pages.setdefault((tenant, period), _Page())

    def _tidy(self, now: float) -> None:
        """Forget periods that have ended, at most once a minute."""
        if now // 60 == self._tidied:
            return
        self._tidied = int(now // 60)
        for key in [key for key in self._pages if key[1].ends <= now]:
            del self._pages[key]
