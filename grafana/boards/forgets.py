"""Forgets by result, and the KV that they freed."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard
from panels import Query, time_series
from queries import BY_BOTH, BY_TENANT, per_minute, per_second

ERASURES = "leyline_erasures_total"
FORGETS = "leyline_forgets_total"


def add_forgets(board: dashboard.Dashboard) -> None:
    """Add erased tokens by place."""
    board.with_row(dashboard.Row("Forgets"))
    board.with_panel(
        time_series(
            "KV freed by forget, by tenant",
            "Tokens per second whose KV was overwritten and given back to the engine's pool. A "
            "splice copies and frees nothing by itself. Bad: 0 while a policy redacts; the "
            "removed text is then still held.",
            [
                Query(
                    per_second("leyline_freed_tokens_total", BY_BOTH, "tenant"),
                    "{{tenant}}",
                )
            ],
            unit="short",
        )
    )
    board.with_panel(
        time_series(
            "Forgets by what came of them",
            "Turns per minute that demanded to forget something: erased, pending (running requests "
            "still hold some), owed (an engine has not confirmed it yet), unreachable (a "
            "conversation without a name, or an engine without forgets). Bad: unreachable; name "
            "sessions where secrets are redacted.",
            [Query(per_minute(FORGETS, BY_TENANT, "result"), "{{result}}")],
            unit="cpm",
        )
    )
    board.with_panel(
        time_series(
            "Forgets carried to engines",
            "Forgets per minute for engines that had the session before, or did not confirm one "
            "with its turn: erased, gone (the engine's run has ended), pending (not confirmed at "
            "the first try), lost (the engine is unknown, or shows no capability document). Bad: "
            "lost, and pending "
            "that isn't followed by erased or gone (LeylineForgetsPending).",
            [Query(per_minute(ERASURES, "", "result"), "{{result}}")],
            unit="cpm",
        )
    )
