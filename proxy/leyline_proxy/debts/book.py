"""Debts, and their stores: one run of an engine that still has to forget a session. Pure.

A debt has names only, no text.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

import msgspec

DebtKey = tuple[str, str, str]
"""Tenant, session, and the engine's run."""

Owner = tuple[str, str]
"""Tenant and session."""


class Debt(msgspec.Struct, array_like=True, frozen=True):
    """A forget that a run of an engine hasn't confirmed."""

    tenant: str
    session: str
    run: str
    replica: str
    """The engine's name in the settings."""
    created: float = 0.0
    """Start of the session, in seconds since the epoch: a session with another start has expired
    meanwhile and says nothing about this debt. 0 for a debt that no session records."""

    @property
    def owner(self) -> Owner:
        """Tenant and session."""
        return self.tenant, self.session

    @property
    def key(self) -> DebtKey:
        """The name among all debts."""
        return self.tenant, self.session, self.run


class Inherited(msgspec.Struct, array_like=True, frozen=True):
    """Debts whose carriers have gone, for the process that asked."""

    debts: tuple[Debt, ...] = ()
    known: bool = True
    """False if the store had none of the asker's own debts: they must be written again."""


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


class DebtStoreGoneError(Exception):
    """The store can't be asked now."""


class DebtStore(Protocol):
    """Debts, each with the process that carries it.

    A debt of a process that has gone is given to another. In doubt two carry it, never none: a
    forget does no harm twice. ``write`` and ``inherit`` raise :class:`DebtStoreGoneError` if the
    store is out of reach."""

    @property
    def name(self) -> str:
        """Name for operators."""

    async def write(self, debts: Sequence[Debt], paid: Sequence[DebtKey]) -> bool:
        """Note debts of this process, and forget those that are paid.

        Returns:
            False if the store has lost, or given to others, what it had from this process.
        """

    async def inherit(self, *, whole: bool = False) -> Inherited:
        """Show that this process lives, and take over the debts of those that don't.

        Args:
            whole: True to get all debts of this process, after a call whose answer was lost.
        """

    async def aclose(self) -> None:
        """Leave this process's debts to others, and close all connections."""


class MemoryDebtStore:
    """The :class:`DebtStore` of a process that is alone: its debts end with it.

    Args:
        book: what it shares with others, if any.
    """

    name = "memory"

    def __init__(self, book: DebtBook | None = None) -> None:
        self._book = book if book is not None else DebtBook()

    async def write(self, debts: Sequence[Debt], paid: Sequence[DebtKey]) -> bool:
        self._book.write(self, debts, paid)
        return True

    async def inherit(self, *, whole: bool = False) -> Inherited:
        return self._book.inherit(self)

    async def aclose(self) -> None:
        self._book.leave(self)
