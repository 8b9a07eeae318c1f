"""The rows of the board *Proxy* about its engines."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard
from panels import Query, time_series
from queries import BY_MODEL, BY_UPSTREAM, per_minute, quantile, share, total


def add_engines(board: dashboard.Dashboard) -> None:
    """Add the engines of the proxy."""
    board.with_row(dashboard.Row("Engines"))
    board.with_panel(
        time_series(
            "Engine answers, circuit open",
            "Up: 1 while the engine answers; circuit: 1 while it gets no requests because earlier "
            "ones failed. Bad: up at 0 or circuit at 1.",
            [
                Query(f"min by (upstream) (leyline_upstream_up{{{BY_UPSTREAM}}})", "{{upstream}}"),
                Query(
                    f"max by (upstream) (leyline_upstream_circuit_open{{{BY_UPSTREAM}}})",
                    "circuit {{upstream}}",
                ),
            ],
            unit="short",
            width=8,
        )
    )
    board.with_panel(
        time_series(
            "Requests in progress by engine",
            "Bad: one engine with many times the requests of others; the weights are wrong, or "
            "one session is very large.",
            [Query(total("leyline_upstream_running", BY_UPSTREAM, "upstream"), "{{upstream}}")],
            unit="short",
            width=8,
        )
    )
    _add_losses(board)
    board.with_panel(
        time_series(
            "Receipts by how they came",
            "Chat turns per minute. Bad: late, absent or not_asked; an engine doesn't account for "
            "its turns, so later edits can't use them as sources.",
            [Query(per_minute("leyline_receipts_total", BY_UPSTREAM, "came"), "{{came}}")],
            unit="cpm",
            stacked=True,
            width=8,
        )
    )


def _add_losses(board: dashboard.Dashboard) -> None:
    """Add what costs sessions their cache."""
    board.with_panel(
        time_series(
            "Failovers, moved sessions, receipts missing",
            "Since the proxy started: requests that moved to another engine, by the engine that "
            "failed them; turns behind a router that another engine or run has answered; turns "
            "without a receipt. Bad: steps; each costs a session its cache or its sources.",
            [
                Query(
                    total("leyline_failovers_total", BY_UPSTREAM, "upstream"),
                    "failed by {{upstream}}",
                ),
                Query(
                    total(
                        "leyline_router_answers_total",
                        f'{BY_UPSTREAM}, answered!~"first|holder"',
                        "upstream, answered",
                    ),
                    "{{answered}}: {{upstream}}",
                ),
                Query(
                    total("leyline_receipts_missing_total", BY_MODEL, "model"),
                    "receipts missing: {{model}}",
                ),
            ],
            unit="short",
            width=8,
        )
    )


def add_comparison(board: dashboard.Dashboard) -> None:
    """Add a comparison of the engines."""
    turns, tokens = "leyline_upstream_turns_total", "leyline_upstream_prompt_tokens_total"
    board.with_panel(
        time_series(
            "Turns by engine and outcome",
            "Chat turns per minute. Bad: reprefilled on one engine only; it has no plugin, or its "
            "pool is too small.",
            [
                Query(
                    per_minute(turns, BY_UPSTREAM, "upstream, outcome"),
                    "{{upstream}}: {{outcome}}",
                )
            ],
            unit="cpm",
            stacked=True,
            width=8,
        )
    )
    prefilled = f'{BY_UPSTREAM},source="prefilled"'
    board.with_panel(
        time_series(
            "Hit ratio by engine",
            "Share of prompt tokens taken from the cache. Bad: one engine below the others; it "
            "evicts more, restarted, or gets sessions that belong elsewhere.",
            [
                Query(
                    f"1 - {share(prefilled, BY_UPSTREAM, tokens, by='upstream')}",
                    "{{upstream}}",
                )
            ],
            unit="percentunit",
            ceiling=1,
            width=8,
        )
    )
    board.with_panel(
        time_series(
            "Time to first token by engine",
            "p90, as the engine answered the proxy. Bad: one engine slower than the others.",
            [
                Query(
                    quantile(0.9, "leyline_upstream_ttft_seconds", BY_UPSTREAM, "upstream"),
                    "{{upstream}}",
                )
            ],
            unit="s",
            width=8,
        )
    )
