"""The budgets of the settings."""

from __future__ import annotations

from ..budgets import Budgets
from ..budgets.redis import RedisBudgetStore
from ..budgets.store import BudgetStore, MemoryBudgetStore
from ..hub.budgets import DIED, NotedBudgetStore, SharedBudgetStore
from ..hub.link import HubLink
from ..settings import Settings
from ..telemetry.metrics import Metrics
from ..turns.charging import TurnCharges
from .stores import redis_options


def build_charges(settings: Settings, metrics: Metrics, link: HubLink | None = None) -> TurnCharges:
    """Return the budgets of turns; nothing is connected yet.

    Args:
        link: to the hub, which then counts what would be in this process's memory.
    """
    budgets = Budgets(
        _store(settings, link),
        metrics,
        open_when_down=settings.budget_store_down == "open",
        currency=settings.budget_currency(),
        price_of=settings.price_of,
    )
    if link is not None:
        link.on(DIED, lambda word: budgets.take_over(word.tenant, word.settlements))
    return TurnCharges(budgets, metrics, answer_tokens=settings.budget_answer_tokens)


def _store(settings: Settings, link: HubLink | None) -> BudgetStore:
    if settings.budget_store == "redis":
        store = RedisBudgetStore(redis_options(settings), settings.redis_prefix)
        return NotedBudgetStore(store, link) if link is not None else store
    return SharedBudgetStore(link) if link is not None else MemoryBudgetStore()
