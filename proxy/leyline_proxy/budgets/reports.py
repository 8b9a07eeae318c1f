"""Reports on budgets, for callers and operators."""

from __future__ import annotations

from typing import Protocol

from ..model.budgets import Standing, StoreState
from ..tenants import Tenant


class BudgetReports(Protocol):
    """Reports what is used, in one process or in all of a proxy."""

    async def standings(self, tenant: Tenant) -> list[Standing]:
        """Return the state of a tenant's budgets, as far as known while the store is down."""

    async def state(self) -> StoreState:
        """Return the state of the store, as found when it was last asked."""
