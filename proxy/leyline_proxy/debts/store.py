"""Stores of debts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .book import DebtBook
from .debt import Debt, DebtKey, Inherited


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
