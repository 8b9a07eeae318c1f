"""The proxy's stores of prompts and of evicted texts."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard
from panels import Query, time_series
from queries import total


def add_warm_starts(board: dashboard.Dashboard) -> None:
    """Add the results of warm starts."""
    board.with_panel(
        time_series(
            "Warm starts",
            "Since the proxy started: prompts for new engines by outcome, their tokens, changes of "
            "their files. Bad: a step of corrupt, wrong_key, other_tenant, engine_failed, "
            "over_time, or of a file that is left: delete it.",
            [
                Query(total("leyline_warm_start_runs_total", "", "outcome"), "{{outcome}}"),
                Query(total("leyline_warm_start_tokens_total", ""), "tokens"),
                Query(total("leyline_warm_start_files_total", "", "result"), "file {{result}}"),
            ],
            unit="short",
            width=24,
        )
    )


def add_recall_store(board: dashboard.Dashboard) -> None:
    """Add the state of the store of evicted texts."""
    board.with_panel(
        time_series(
            "Store of evicted texts",
            "Failed operations since the proxy started, sessions with a forget that the store "
            "doesn't know yet, and texts in the proxy's memory. Bad: a step of put (texts are "
            "lost), or forgets that are owed for minutes.",
            [
                Query(total("leyline_recall_store_errors_total", "", "operation"), "{{operation}}"),
                Query("sum(leyline_recall_forgets_owed)", "forgets owed"),
                Query("sum(leyline_recall_store_entries)", "in memory"),
            ],
            unit="short",
        )
    )
    board.with_panel(
        time_series(
            "Evicted texts in memory",
            "Size of the texts that can be brought back, and whether their store can be used "
            "(1 is yes; 0, too, where recall is off). Bad: at recall_memory_bytes tenants lose "
            "their oldest.",
            [
                Query("sum(leyline_recall_store_bytes)", "bytes"),
                Query("min(leyline_recall_store_up)", "usable"),
            ],
            unit="bytes",
        )
    )
