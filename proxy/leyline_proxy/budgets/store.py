"""Stores of usage, and reports on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from ..model.budgets import Asked, Reserved, Settlement, Standing, StoreState, Usage
from ..tenants import Tenant
from .book import Book


class BudgetStoreGoneError(Exception):
    """The store can't be asked now."""


class BudgetStore(Protocol):
    """Counts the usage of tenants.

    Every method raises :class:`BudgetStoreGoneError` if the store is out of reach."""

    @property
    def name(self) -> str:
        """Name for operators."""

    async def reserve(self, asked: Asked) -> Reserved:
        """Hold an amount in all periods of a tenant at once, or in none."""

    async def settle(self, tenant: str, settlements: Sequence[Settlement]) -> None:
        """End holds, and add what was used."""

    async def usages(self, asked: Asked) -> tuple[Usage, ...]:
        """Return the usage by period."""

    async def aclose(self) -> None:
        """Close all connections."""


class MemoryBudgetStore:
    """The :class:`BudgetStore` of one process."""

    name = "memory"

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._book = Book()
        self._now = now

    async def reserve(self, asked: Asked) -> Reserved:
        return self._book.reserve(asked, self._now())

    async def settle(self, tenant: str, settlements: Sequence[Settlement]) -> None:
        self._book.settle(tenant, settlements, self._now())

    async def usages(self, asked: Asked) -> tuple[Usage, ...]:
        return self._book.usages(asked)

    async def aclose(self) -> None:
        """Do nothing."""


class BudgetReports(Protocol):
    """Reports what is used, in one process or in all of a proxy."""

    async def standings(self, tenant: Tenant) -> list[Standing]:
        """Return the state of a tenant's budgets, as far as known while the store is down."""

    async def state(self) -> StoreState:
        """Return the state of the store, as found when it was last asked."""
