"""Checks of budgets: counts that a restart would end, and models without a price."""

from __future__ import annotations

from ..settings import Settings
from ..settings.budgets import Budget
from .findings import Finding, ok, skip, warn

_NAME = "budgets"
_LONG = ("day", "month")


def examine_budgets(settings: Settings) -> list[Finding]:
    """Check that budgets are counted for as long as their windows, and that models have prices."""
    found = _all(settings)
    if not found:
        return [skip(_NAME, "no tenant has a budget (budgets)")]
    findings = []
    if settings.budget_store == "memory" and counts_long(settings):
        findings.append(
            warn(
                _NAME,
                "budgets of a day or a month are counted in memory, which starts at 0 with each "
                "start of the proxy",
                "Set budget_store: redis, with a session_store in Redis.",
            )
        )
    if any(each.money is not None for each in found) and "default" not in settings.prices:
        findings.append(
            warn(
                _NAME,
                "there are budgets of money, and other models than those in prices are refused",
                "Add default to prices, if that isn't intended.",
            )
        )
    return findings or [ok(_NAME, f"counted in {settings.budget_store}")]


def counts_long(settings: Settings) -> bool:
    """Return True if a budget's window is longer than a restart may be tolerated."""
    return any(each.window in _LONG for each in _all(settings))


def _all(settings: Settings) -> list[Budget]:
    """Return the budgets of all tenants."""
    own = [each.budgets for each in settings.tenants.values() if each.budgets is not None]
    return [budget for budgets in (settings.budgets, *own) for budget in budgets]
