"""Settlements that a store couldn't take, added up until it can. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ..model.budgets import Amount, Period, Settlement


class OwedSettlements:
    """Sums that the store is owed, by tenant, period and slot of the reservations.

    There are as many entries as current periods and slots, whatever the number of requests."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, Period, int], Settlement] = {}

    def __len__(self) -> int:
        return len(self._sums)

    def add(self, tenant: str, settlements: Sequence[Settlement], now: float) -> None:
        """Owe settlements; those of periods that have ended are forgotten."""
        for key in [key for key in self._sums if key[1].ends <= now]:
            del self._sums[key]
        for each in settlements:
            if each.period.ends <= now:
                continue
            key = (tenant, each.period, each.lapses)
            known = self._sums.get(key, each._replace(used=Amount(), held=Amount()))
            used, held = known.used.plus(each.used), known.held.plus(each.held)
            self._sums[key] = known._replace(used=used, held=held)
            if used == held == Amount():
                del self._sums[key]

    def used(self, tenant: str, period: Period) -> Amount:
        """Return what a tenant has used that the store doesn't know."""
        found = Amount()
        for (owner, when, _), each in self._sums.items():
            if (owner, when) == (tenant, period):
                found = found.plus(each.used)
        return found

    def tenants(self) -> list[str]:
        """Return the tenants that owe something."""
        return list(dict.fromkeys(tenant for tenant, _, _ in self._sums))

    def take(self, tenant: str, now: float) -> list[Settlement]:
        """Take what a tenant owes; what concerns periods that have ended is forgotten."""
        keys = [key for key in self._sums if key[0] == tenant]
        taken = [self._sums.pop(key) for key in keys]
        return [each for each in taken if each.period.ends > now]
