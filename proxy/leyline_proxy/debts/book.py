"""Debts by the process that carries them, in memory. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from .debt import Debt, DebtKey, Inherited


class DebtBook:
    """Debts of all carriers. Those of a carrier that leaves wait for the next one that asks.

    Each carrier bounds its own, so the book is as large as all of them together."""

    def __init__(self) -> None:
        self._carried: dict[Hashable, dict[DebtKey, Debt]] = {}
        self._left: dict[DebtKey, Debt] = {}

    def __len__(self) -> int:
        return len(self._left) + sum(map(len, self._carried.values()))

    def write(self, carrier: Hashable, debts: Sequence[Debt], paid: Sequence[DebtKey]) -> None:
        """Note debts that a carrier has taken on, and others that are paid."""
        own = self._carried.setdefault(carrier, {})
        own.update((each.key, each) for each in debts)
        for key in paid:
            own.pop(key, None)

    def inherit(self, carrier: Hashable) -> Inherited:
        """Give a carrier the debts of those that have left."""
        left, self._left = self._left, {}
        self.write(carrier, [*left.values()], ())
        return Inherited(tuple(left.values()))

    def leave(self, carrier: Hashable) -> None:
        """Keep the debts of a carrier that has gone for others."""
        for key, debt in self._carried.pop(carrier, {}).items():
            self._left[key] = older(debt, self._left.get(key))


def older(debt: Debt, other: Debt | None) -> Debt:
    """Return the one of two equal debts that depends on less: a debt without a session's record is
    carried whatever a session says."""
    return debt if other is None or debt.created <= other.created else other
