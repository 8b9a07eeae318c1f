"""The board that a user opens first: prompt tokens from the cache, and the others."""

from __future__ import annotations

from frame import frame
from grafana_foundation_sdk.builders import dashboard
from panels import Query, bars, single_value, time_series
from queries import (
    BY_BOTH,
    BY_MODEL,
    NOTHING_TO_SPLICE,
    RANGE,
    hit_ratio,
    or_zero,
    over_range,
    per_minute,
    per_second,
    quantile,
    share,
)

from boards.pool import REUSED

TURN_BUCKETS = ("1", "2-4", "5-9", "10-19", "20-39", "40+")
SOURCE_COLORS = {"cached": "green", "spliced": "blue", "reused": REUSED, "prefilled": "orange"}
KIND_COLORS = {"clean": "green", "session": "blue", "tenant": REUSED, "group": "purple"}
RATIO_COLORS = ((None, "red"), (0.5, "orange"), (0.8, "green"))
PLAIN = ((None, "blue"),)

PROMPT = "leyline_prompt_tokens_total"
TURNS = "leyline_turns_total"
REUSE = "leyline_reuse_tokens_total"
GATED = "leyline_reuse_gated_total"
BUSTS = "leyline_cache_busts_total"
BUST_TOKENS = "leyline_cache_bust_tokens_total"
AVOIDED = "leyline_prefill_avoided_tokens_total"
AVOIDED_SECONDS = "leyline_prefill_avoided_seconds_total"
STRIPPED = "leyline_reasoning_edit_tokens_total"
DISCREPANCY = "leyline_cache_discrepancy_tokens_total"


def build() -> dashboard.Dashboard:
    """The board *Leyline / Cache hit*."""
    board = frame(
        "cache-hit",
        "Cache hit",
        "Effects of agents' edits on the KV cache, and savings by splicing.",
        ("tenant", "model"),
    )
    for add_row in (_add_now, _add_cost, _add_hits, _add_savings, _add_busts, _add_turns):
        add_row(board)
    return board


def _add_now(board: dashboard.Dashboard) -> None:
    """Add the row of single numbers."""
    board.with_row(dashboard.Row("Now"))
    board.with_panel(
        single_value(
            "Hit ratio now",
            "Share of prompt tokens whose KV came from the cache: unchanged, spliced or reused. "
            "Bad: below 0.5 while agents run long sessions; see the busts by cause below.",
            Query(hit_ratio()),
            unit="percentunit",
            thresholds=RATIO_COLORS,
        )
    )
    edited = f'{BY_BOTH},outcome=~"spliced|reprefilled",reason!~"{NOTHING_TO_SPLICE}"'
    spliced = f'{BY_BOTH},outcome="spliced"'
    board.with_panel(
        single_value(
            "Edited turns spliced",
            "Share of the turns that edited cached messages and were spliced, over the time "
            "range; turns with nothing to move don't count. Bad: near 0 while the engine splices; "
            "undeclared edits are exact by default and count here as prefilled again.",
            Query(share(spliced, edited, TURNS, RANGE), instant=True),
            unit="percentunit",
            thresholds=RATIO_COLORS,
        )
    )
    board.with_panel(
        single_value(
            "Prefill avoided",
            "Prompt tokens, over the time range, that were spliced after an edit or reused from "
            "elsewhere. Without that, the engine would have prefilled them. Bad: 0 while policies "
            "edit.",
            Query(or_zero(over_range(AVOIDED, BY_BOTH)), instant=True),
            unit="short",
            thresholds=PLAIN,
        )
    )


def _add_cost(board: dashboard.Dashboard) -> None:
    """Add costs and savings, in single numbers."""
    board.with_panel(
        single_value(
            "Prefill time avoided",
            "The same as time on the engine, over the time range. An estimate, from the median "
            "time to prefill a token on the model's last streamed turns. Bad: 0 while policies "
            "edit and turns are streamed.",
            Query(or_zero(over_range(AVOIDED_SECONDS, BY_BOTH)), instant=True),
            unit="s",
            thresholds=PLAIN,
        )
    )
    board.with_panel(
        single_value(
            "Prefilled again",
            "Prompt tokens over the time range that their session had in the cache, but that were "
            "computed again. Bad: more than splicing avoided; the row of busts has the causes.",
            Query(or_zero(over_range(BUST_TOKENS, BY_BOTH)), instant=True),
            unit="short",
            thresholds=PLAIN,
        )
    )
    board.with_panel(
        single_value(
            "Engine splices",
            "Yes if all engines that are up splice, from their capability documents; no if one "
            "doesn't. Bad: no; its edits are prefilled again. `leyline doctor URL` says why.",
            Query(
                f"min(leyline_engine_splices{{{BY_MODEL}}}"
                " and on (job, instance, upstream) leyline_upstream_up == 1)"
            ),
            unit="none",
            thresholds=((None, "red"), (1, "green")),
            words={"0": "no", "1": "yes"},
        )
    )


def _add_hits(board: dashboard.Dashboard) -> None:
    """Add the hit ratio over time and by the age of the session."""
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
                    hit_ratio("tenant", RANGE, f'turn="{bucket}"'),
                    f"turn {bucket}: {{{{tenant}}}}",
                    instant=True,
                )
                for bucket in TURN_BUCKETS
            ],
            unit="percentunit",
            thresholds=RATIO_COLORS,
        )
    )


def _add_savings(board: dashboard.Dashboard) -> None:
    """Add the origins of tokens, and the savings of splicing and reuse."""
    board.with_row(dashboard.Row("Tokens"))
    board.with_panel(
        time_series(
            "Prompt tokens by source",
            "Prompt tokens per second: cached (found as they were), spliced (moved to a new "
            "position after an edit), reused (copied from another place or session), prefilled "
            "(computed). Bad: orange on top of everything in long sessions.",
            [Query(per_second(PROMPT, BY_BOTH, "source"), "{{source}}")],
            unit="short",
            stacked=True,
            colors=SOURCE_COLORS,
        )
    )
    _add_reuse(board)
    board.with_panel(
        time_series(
            "Prefill avoided by tenant",
            "Tokens per second that were spliced after an edit or reused from elsewhere, instead "
            "of being prefilled. Bad: 0 for a tenant whose history is edited; see *Edits and "
            "policies*.",
            [Query(per_second(AVOIDED, BY_BOTH, "tenant"), "{{tenant}}")],
            unit="short",
        )
    )
    board.with_panel(
        time_series(
            "Prefill time avoided by model",
            "Seconds of the engine's time per minute that splicing and reuse saved. An estimate "
            "from the median time of a prefilled token. Bad: near 0 while tokens are avoided; the "
            "engine prefills faster than it copies.",
            [Query(per_minute(AVOIDED_SECONDS, BY_BOTH, "model"), "{{model}}")],
            unit="s",
        )
    )


def _add_reuse(board: dashboard.Dashboard) -> None:
    """Add content that the engine held elsewhere."""
    board.with_panel(
        time_series(
            "Content reuse",
            "Tokens per second whose content the engine held elsewhere, by what their KV has read: "
            "clean (only text that the prompt begins with), session (other text of the session), "
            "tenant (text of another session), group (text of another tenant). Copied, or only "
            "counted (could be). Bad: could be stays high, prefill that `reuse: live` would avoid; "
            "or tenant and group are most of what is copied where answers must be as without "
            "reuse.",
            [
                Query(per_second(REUSE, f'{BY_BOTH},mode="live"', "kind"), "{{kind}}"),
                Query(per_second(REUSE, f'{BY_BOTH},mode="observe"', "kind"), "could be: {{kind}}"),
            ],
            unit="short",
            colors=KIND_COLORS,
        )
    )
    board.with_panel(
        time_series(
            "Reuse given up by tenant",
            "Turns per minute without reuse because a first token's margin was below "
            "`reuse_margin`. Bad: most turns that reuse; they cost their prefill, and more.",
            [Query(per_minute(GATED, BY_BOTH, "tenant"), "{{tenant}}")],
            unit="cpm",
        )
    )


def _add_busts(board: dashboard.Dashboard) -> None:
    """Add tokens that were in the cache and computed again."""
    board.with_row(dashboard.Row("Cache busts"))
    board.with_panel(
        time_series(
            "Busts by cause",
            "Tokens per second that the session's last turn had in this prompt's reach and that "
            "were prefilled again, by cause: policy, declared and undeclared edits, "
            "template, tools (the tool set changed), session (another id before), "
            "failover (another engine), engine (nothing was edited; it evicted or "
            "restarted). Bad: undeclared (map the role to amortize, or stop the harness), tools "
            "(keep their order), session (keep the id), engine (pool too small).",
            [Query(per_second(BUST_TOKENS, BY_BOTH, "cause"), "{{cause}}")],
            unit="short",
            stacked=True,
        )
    )
    board.with_panel(
        time_series(
            "Busted turns by tenant and cause",
            "Turns per minute that prefilled cached tokens again. Bad: a tenant with one on "
            "nearly every turn.",
            [Query(per_minute(BUSTS, BY_BOTH, "tenant, cause"), "{{tenant}}: {{cause}}")],
            unit="cpm",
        )
    )
    board.with_panel(
        time_series(
            "Thinking that templates strip",
            "Tokens per second after thinking that the chat template stripped: kept (copied, "
            "by `reasoning_edits: amortize`) or lost (prefilled, as it is exact or the session has "
            "no certain name). Bad: lost, unless answers must be those of a new prefill.",
            [Query(per_second(STRIPPED, BY_BOTH, "effect"), "{{effect}}")],
            unit="short",
        )
    )
    bust_share = (
        f"sum by (tenant) (rate({BUST_TOKENS}{{{BY_BOTH}}}[$__rate_interval]))"
        f" / (sum by (tenant) (rate({PROMPT}{{{BY_BOTH}}}[$__rate_interval])) > 0)"
    )
    board.with_panel(
        time_series(
            "Share of prompts that was busted",
            "Tokens prefilled again as a share of all prompt tokens, per tenant. Bad: above 0.3, "
            "where an alert fires (LeylineCacheBusts).",
            [Query(bust_share, "{{tenant}}")],
            unit="percentunit",
            ceiling=1,
        )
    )
    board.with_panel(
        time_series(
            "Discrepancy with the engine",
            "Tokens per second by which the engine's count of cached tokens differs from the "
            "proxy's expectation: lost (the engine had less), found (it had more, from other "
            "sessions). Bad: lost that persists; the engine evicts KV that sessions need.",
            [Query(per_second(DISCREPANCY, BY_BOTH, "direction"), "{{direction}}")],
            unit="short",
        )
    )


def _add_turns(board: dashboard.Dashboard) -> None:
    """Add the outcomes and durations of turns."""
    board.with_row(dashboard.Row("Turns"))
    board.with_panel(
        time_series(
            "Turns by outcome",
            "Chat turns per minute by outcome and reason. Bad: source_evicted (pool or session "
            "store too small), missing_source (the engine forgot the turn), unsupported_runtime "
            "(the engine can't splice this model), transform_failed or token_mismatch (report it).",
            [Query(per_minute(TURNS, BY_BOTH, "outcome, reason"), "{{outcome}}: {{reason}}")],
            unit="cpm",
            stacked=True,
        )
    )
    ttft = "leyline_ttft_seconds"
    board.with_panel(
        time_series(
            "Time to first token by outcome",
            "p50 and p90 from a chat request's arrival to its first token (whole answers when not "
            "streamed). Bad: spliced as slow as reprefilled; the splice then saves nothing.",
            [
                Query(quantile(0.5, ttft, BY_BOTH, "outcome"), "p50 {{outcome}}"),
                Query(quantile(0.9, ttft, BY_BOTH, "outcome"), "p90 {{outcome}}", exemplars=True),
            ],
            unit="s",
        )
    )
