"""Budgets of tenants, as a part of the board *Leyline / Proxy*."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard
from panels import Query, time_series
from queries import BY_TENANT, total


def add_budgets(board: dashboard.Dashboard) -> None:
    """Add what tenants use of their budgets."""
    board.with_panel(
        time_series(
            "Budgets used",
            "Used share of each budget in its present window, by tenant, window and unit. Bad: "
            "near 1, where requests are refused until the window ends (LeylineBudgetNearlyUsed).",
            [
                Query(
                    f"max by (tenant, window, unit) (leyline_budget_used_ratio{{{BY_TENANT}}})",
                    "{{tenant}}: {{unit}} per {{window}}",
                )
            ],
            unit="percentunit",
            width=12,
        )
    )
    board.with_panel(
        time_series(
            "Budgets: failures and estimates",
            "Since the proxy started: failed operations of the store of budgets, and requests that "
            "were charged an estimate. Bad: any failure (LeylineBudgetStoreDown); many of "
            "no_usage, because an engine reports no usage.",
            [
                Query(total("leyline_budget_store_errors_total", "", "result"), "store {{result}}"),
                Query(total("leyline_budget_estimates_total", "", "reason"), "estimate {{reason}}"),
            ],
            unit="short",
            width=12,
        )
    )
