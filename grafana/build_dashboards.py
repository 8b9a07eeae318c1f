"""Write the Grafana dashboards: ``python grafana/build_dashboards.py``.

The JSON files under ``dashboards/`` are generated; change this script, not them. A test fails when
they differ, and when a query names a metric that the proxy doesn't have.
"""

from __future__ import annotations

import json
from pathlib import Path

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync
from panels import (
    BY_BOTH,
    BY_MODEL,
    BY_TENANT,
    Query,
    bars,
    datasource_variable,
    label_variable,
    single_value,
    time_series,
)

FOLDER = Path(__file__).resolve().parent / "dashboards"
TURN_BUCKETS = ("1", "2-4", "5-9", "10-19", "20-39", "40+")
SOURCE_COLORS = {"cached": "green", "spliced": "blue", "prefilled": "orange"}
RATIO_COLORS = ((None, "red"), (0.5, "orange"), (0.8, "green"))
FAULT_COLORS = ((None, "green"), (1, "red"))


def hit_ratio(by: str = "", window: str = "$__rate_interval", extra: str = "") -> str:
    """PromQL for the share of prompt tokens that were not prefilled, grouped by labels ``by``.

    Written as 1 - prefilled / all because every prompt prefills at least its last token: the
    prefilled series always exists, those of the cached and spliced tokens may not yet. Groups
    without traffic give no sample instead of NaN.
    """
    group = f" by ({by})" if by else ""

    def tokens(*labels: str) -> str:
        selector = ",".join(part for part in (BY_BOTH, extra, *labels) if part)
        return f"sum{group} (rate(leyline_prompt_tokens_total{{{selector}}}[{window}]))"

    prefilled = tokens('source="prefilled"')
    return f"1 - {prefilled} / ({tokens()} > 0)"


def per_minute(metric: str, labels: str, by: str) -> str:
    """PromQL for a counter's increase per minute, grouped by labels ``by``."""
    return f"60 * sum by ({by}) (rate({metric}{{{labels}}}[$__rate_interval]))"


def quantile(q: float, metric: str, labels: str, by: str) -> str:
    """PromQL for a quantile of a histogram, grouped by labels ``by``."""
    buckets = f"sum by (le, {by}) (rate({metric}_bucket{{{labels}}}[$__rate_interval]))"
    return f"histogram_quantile({q}, {buckets})"


def add_now(board: dashboard.Dashboard) -> None:
    """The row of single numbers."""
    board.with_row(dashboard.Row("Now"))
    board.with_panel(
        single_value(
            "Hit ratio now",
            "Share of prompt tokens whose KV came from the cache, unchanged or spliced. "
            "Bad: below 0.5 while agents run long sessions; look at the turns' reasons below.",
            Query(hit_ratio()),
            unit="percentunit",
            thresholds=RATIO_COLORS,
        )
    )
    edited = f'leyline_turns_total{{{BY_BOTH},outcome!="unedited"}}'
    spliced = f'leyline_turns_total{{{BY_BOTH},outcome="spliced"}}'
    board.with_panel(
        single_value(
            "Edited turns spliced",
            "Of the turns that carried an edit, the share that was spliced, over the time range. "
            "Bad: near 0 while the engine splices; edits that nobody declared are exact by "
            "default and count here as prefilled again.",
            Query(
                f"(sum(increase({spliced}[$__range])) or vector(0))"
                f" / (sum(increase({edited}[$__range])) > 0)",
                instant=True,
            ),
            unit="percentunit",
            thresholds=RATIO_COLORS,
        )
    )
    saved = f'leyline_prompt_tokens_total{{{BY_BOTH},source="spliced"}}'
    board.with_panel(
        single_value(
            "Tokens kept by splicing",
            "Prompt tokens over the time range that an engine without splicing would have "
            "prefilled again. Bad: 0 while policies edit.",
            Query(f"sum(increase({saved}[$__range]))", instant=True),
            unit="short",
            thresholds=((None, "blue"),),
        )
    )
    board.with_panel(
        single_value(
            "Engine splices",
            "Whether the engine behind the proxy splices, from its capability document. Bad: no; "
            "every edit is then prefilled again. `leyline doctor URL` says why.",
            Query(f"min(leyline_engine_splices{{{BY_MODEL}}})"),
            unit="none",
            thresholds=((None, "red"), (1, "green")),
            words={"0": "no", "1": "yes"},
        )
    )
    board.with_panel(
        single_value(
            "Sessions",
            "Conversations in the session store. Bad: at the store's limit; older sessions are "
            "then forgotten and their next edit finds no source.",
            Query("sum(leyline_sessions)"),
            unit="short",
            thresholds=((None, "blue"),),
        )
    )
    board.with_panel(
        single_value(
            "Policy faults since start",
            "Policies that raised or returned nonsense; the turn was sent without them. Bad: "
            "anything but 0.",
            Query("sum(leyline_policy_faults_total) or vector(0)"),
            unit="short",
            thresholds=FAULT_COLORS,
        )
    )


def add_hits(board: dashboard.Dashboard) -> None:
    """Hit ratio over time and by the age of the session."""
    board.with_row(dashboard.Row("Hit ratio"))
    board.with_panel(
        time_series(
            "Hit ratio by tenant",
            "Share of prompt tokens taken from the cache, per tenant. Bad: one tenant far below "
            "the others (its harness rewrites history), or a drop of all at once (evictions, or "
            "an engine that restarted).",
            [Query(hit_ratio("tenant"), "{{tenant}}")],
            unit="percentunit",
            ceiling=1,
        )
    )
    board.with_panel(
        bars(
            "Hit ratio by turn and tenant",
            "Hit ratio by the turn's number in its session, over the time range. It should rise "
            "with the turns. Bad: later turns below earlier ones; something edits the start of "
            "the prompt, or sources are evicted before they are used.",
            [
                Query(
                    hit_ratio("tenant", "$__range", f'turn="{bucket}"'),
                    f"turn {bucket}: {{{{tenant}}}}",
                    instant=True,
                )
                for bucket in TURN_BUCKETS
            ],
            unit="percentunit",
            thresholds=RATIO_COLORS,
        )
    )
    board.with_panel(
        time_series(
            "Prompt tokens by source",
            "Prompt tokens per second: cached (found as they were), spliced (moved to a new "
            "position), prefilled (computed). Bad: orange on top of everything in long sessions.",
            [
                Query(
                    "sum by (source) (rate("
                    f"leyline_prompt_tokens_total{{{BY_BOTH}}}[$__rate_interval]))",
                    "{{source}}",
                )
            ],
            unit="short",
            stacked=True,
            colors=SOURCE_COLORS,
        )
    )
    board.with_panel(
        time_series(
            "Turns by outcome",
            "Chat turns per minute by outcome and reason. Bad: source_evicted (pool or session "
            "store too small), missing_source (the engine forgot the turn), unsupported_runtime "
            "(the engine can't splice this model), transform_failed or token_mismatch (report it).",
            [
                Query(
                    per_minute("leyline_turns_total", BY_BOTH, "outcome, reason"),
                    "{{outcome}}: {{reason}}",
                )
            ],
            unit="cpm",
            stacked=True,
        )
    )


def add_edits(board: dashboard.Dashboard) -> None:
    """What was edited, by whom, and what it gave."""
    board.with_row(dashboard.Row("Edits"))
    edits = "leyline_edits_total"
    board.with_panel(
        time_series(
            "Edits by outcome",
            "Edits per minute by the reason in the engine's receipt (all models). Bad: anything "
            "but spliced, except reprefilled for exact and forget edits.",
            [Query(per_minute(edits, BY_TENANT, "outcome"), "{{outcome}}")],
            unit="cpm",
            stacked=True,
        )
    )
    board.with_panel(
        time_series(
            "Edits by cause and mode",
            "Edits per minute by who made them (policy, the caller's declaration, the caller "
            "without one, the chat template) and under which mode. Bad: many undeclared exact "
            "edits of tool results; consider mapping that role to amortize for the tenant.",
            [Query(per_minute(edits, BY_TENANT, "cause, mode"), "{{cause}}: {{mode}}")],
            unit="cpm",
            stacked=True,
        )
    )
    board.with_panel(
        time_series(
            "KV freed by forget",
            "Tokens per second whose KV was overwritten and given back to the engine's pool. A "
            "splice copies and frees nothing by itself. Bad: 0 while a policy redacts; what was "
            "taken out is then still held.",
            [
                Query(
                    "sum by (tenant) (rate("
                    f"leyline_freed_tokens_total{{{BY_BOTH}}}[$__rate_interval]))",
                    "{{tenant}}",
                )
            ],
            unit="short",
        )
    )
    board.with_panel(
        time_series(
            "Policy faults",
            "Policies that were skipped for a turn, as a total since the proxy started: a step "
            "upwards is a fault. raised: an exception; bad_type, bad_message: no list of "
            "messages; broken_pair: a tool result without its call; lost_last_user: the user's "
            "last message is gone. Bad: any step.",
            [
                Query(
                    "sum by (policy, fault) (leyline_policy_faults_total)",
                    "{{policy}}: {{fault}}",
                )
            ],
            unit="short",
        )
    )


def add_latency(board: dashboard.Dashboard) -> None:
    """How long callers wait, and what of it is the proxy."""
    board.with_row(dashboard.Row("Latency and health"))
    ttft = "leyline_ttft_seconds"
    board.with_panel(
        time_series(
            "Time to first token by outcome",
            "p50 and p90 from a chat request's arrival to its first token (whole answers when not "
            "streamed). Bad: spliced as slow as reprefilled; the splice then saves nothing.",
            [
                Query(quantile(0.5, ttft, BY_BOTH, "outcome"), "p50 {{outcome}}"),
                Query(quantile(0.9, ttft, BY_BOTH, "outcome"), "p90 {{outcome}}"),
            ],
            unit="s",
        )
    )
    board.with_panel(
        time_series(
            "Time in the proxy by stage",
            "p90 of the time that the proxy itself spends on a turn, by stage. Bad: a stage that "
            "grows with the length of the sessions, or a policy slower than the engine.",
            [Query(quantile(0.9, "leyline_stage_seconds", "", "stage"), "{{stage}}")],
            unit="s",
        )
    )
    board.with_panel(
        time_series(
            "Requests by status",
            "Requests per minute by HTTP status; 'disconnected' when the caller left first. Bad: "
            "5xx (engine down or overloaded), many 4xx (a harness that sends what is refused).",
            [Query(per_minute("leyline_requests_total", BY_BOTH, "status"), "{{status}}")],
            unit="cpm",
            stacked=True,
        )
    )
    board.with_panel(
        time_series(
            "Engine reachable, receipts missing",
            "Up: 1 while the engine answers. Missing receipts per minute: turns whose engine gave "
            "no account, so that their cached tokens are unknown. Bad: up at 0, or any missing.",
            [
                Query("min(leyline_upstream_up)", "engine up"),
                Query(
                    per_minute("leyline_receipts_missing_total", BY_MODEL, "model"),
                    "receipts missing: {{model}}",
                ),
            ],
            unit="short",
        )
    )


def cache_hit() -> dashboard.Dashboard:
    """The board *Leyline / Cache hit*."""
    board = (
        dashboard.Dashboard("Leyline / Cache hit")
        .uid("leyline-cache-hit")
        .description("What agents' edits do to the KV cache, and what splicing keeps of it.")
        .tags(["leyline"])
        .time("now-1h", "now")
        .refresh("10s")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(datasource_variable())
        .with_variable(
            label_variable("tenant", "Tenant", "label_values(leyline_requests_total, tenant)")
        )
        .with_variable(
            label_variable(
                "model", "Model", f"label_values(leyline_turns_total{{{BY_TENANT}}}, model)"
            )
        )
    )
    for add_row in (add_now, add_hits, add_edits, add_latency):
        add_row(board)
    return board


BOARDS = {"cache-hit.json": cache_hit}


def render(name: str) -> str:
    """The JSON text of the board file ``name``."""
    board = BOARDS[name]().build()
    for number, panel in enumerate(board.panels or [], start=1):
        panel.id_val = number  # stable links to a panel
    return json.dumps(board, cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def main() -> None:
    """Write every board."""
    FOLDER.mkdir(exist_ok=True)
    for name in BOARDS:
        (FOLDER / name).write_text(render(name), encoding="utf-8")


if __name__ == "__main__":
    main()
