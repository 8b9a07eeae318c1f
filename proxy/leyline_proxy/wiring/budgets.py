"""The budgets of the settings."""

from __future__ import annotations

from ..budgets import Budgets
from ..budgets.redis import RedisBudgetStore
from ..budgets.store import BudgetStore, MemoryBudgetStore
from ..hub.budgets import SharedBudgetStore
from ..hub.link import HubLink
from ..settings import Settings
from ..telemetry.metrics import Metrics
from .stores import redis_options


def build_budgets(settings: Settings, metrics: Metrics, link: HubLink | None = None) -> Budgets:
    """Return the budgets; nothing is connected yet.

    Args:
        link: to the hub, which then counts what would be in this process's memory.
    """
    return Budgets(
        _store(settings, link),
        metrics,
        open_when_down=settings.budget_store_down == "open",
        currency=settings.budget_currency(),
        price_of=settings.price_of,
    )


def _store(settings: Settings, link: HubLink | None) -> BudgetStore:
    if settings.budget_store == "redis":
        return RedisBudgetStore(redis_options(settings), settings.redis_prefix)
    return SharedBudgetStore(link) if link is not None else MemoryBudgetStore()
