"""The engines from the inside: pool, splices, registries, energy."""

from __future__ import annotations

from frame import frame
from grafana_foundation_sdk.builders import dashboard
from panels import Query, single_value, table, time_series
from queries import (
    BY_INSTANCE,
    BY_MODEL,
    BY_UPSTREAM,
    NOTHING_TO_SPLICE,
    RANGE,
    or_zero,
    over_range,
    per_minute,
    per_second,
    quantile,
    share,
    total,
)

from boards.pool import CAPACITY, POOL, REUSED, pool_by_owner, states_by_owner

PLAIN = ((None, "blue"),)
RATIO_COLORS = ((None, "red"), (0.5, "orange"), (0.8, "green"))
FAULT_COLORS = ((None, "green"), (1, "red"))
KIND_COLORS = {
    "prefix": "green",
    "spliced": "blue",
    "reused": REUSED,
    "prefilled": "orange",
    "freed": "purple",
}
PEAK = "leyline_engine_pool_peak_tokens"
REQUESTS = "leyline_engine_requests_total"
TOKENS = "leyline_engine_tokens_total"
SPLICE = "leyline_engine_splice_seconds"
ENERGY = "leyline_engine_energy_joules_total"
REQUEST_ENERGY = "leyline_engine_request_energy_joules"


def build() -> dashboard.Dashboard:
    """The board *Leyline / Engine*."""
    board = frame(
        "engine",
        "Engine",
        "The engines' own metrics: KV pool, splices, registries, energy. With the embedded "
        "engine, the target is the proxy.",
        ("model", "upstream", "instance"),
    )
    for add_row in (
        _add_now,
        _add_numbers,
        _add_losses,
        _add_pool,
        _add_work,
        _add_registries,
        _add_energy,
    ):
        add_row(board)
    return board


def _add_now(board: dashboard.Dashboard) -> None:
    """Add the engines, and single numbers."""
    board.with_row(dashboard.Row("Now"))
    board.with_panel(
        table(
            "Engines",
            "Facts about each engine from its capability document. Splices: 1 if its edits are "
            "spliced, 0 if not. Bad: splices at 0, or a missing engine.",
            {
                "": Query(f"leyline_engine_info{{{BY_UPSTREAM}}}", instant=True),
                "Splices": Query(
                    f"leyline_engine_info{{{BY_UPSTREAM}}}"
                    " * on (job, instance, upstream) group_left ()"
                    f" min by (job, instance, upstream) (leyline_engine_splices{{{BY_MODEL}}})",
                    instant=True,
                ),
            },
            labels={
                "upstream": "Engine",
                "model": "Model",
                "engine": "Software",
                "engine_version": "Version",
                "pool": "Pool",
                "dtype": "Type",
                "rotary": "Rotary",
                "contract": "Contract",
            },
        )
    )


def _add_numbers(board: dashboard.Dashboard) -> None:
    """Add single numbers of the pool and its splices."""
    board.with_panel(
        single_value(
            "Edited requests spliced",
            "Share of the requests with an edit that were spliced, over the time range, by "
            "the engines' own count; those with nothing to move don't count. Bad: near 0; the "
            "reasons are below.",
            Query(
                share(
                    f'{BY_INSTANCE},outcome="spliced"',
                    f'{BY_INSTANCE},outcome!="unedited",reason!~"{NOTHING_TO_SPLICE}"',
                    REQUESTS,
                    RANGE,
                ),
                instant=True,
            ),
            unit="percentunit",
            thresholds=RATIO_COLORS,
        )
    )
    free = total(POOL, f'owner="free",{BY_INSTANCE}')
    used = f"1 - {free} / {total(CAPACITY, BY_INSTANCE)}"
    board.with_panel(
        single_value(
            "Pool filled",
            "Share of the KV pool's slots that hold something. A cache fills over time: full is "
            "normal. Bad: full together with evictions as large as prefills.",
            Query(used),
            unit="percentunit",
            thresholds=PLAIN,
        )
    )
    board.with_panel(
        single_value(
            "Peak of the pool",
            "The most slots occupied at once since the start, of the fullest engine. A cache "
            "fills over time. Bad: 1 soon after a start; the pool is too small for the load.",
            Query(f"max({PEAK}{{{BY_INSTANCE}}} / {CAPACITY}{{{BY_INSTANCE}}})"),
            unit="percentunit",
            thresholds=PLAIN,
        )
    )


def _add_losses(board: dashboard.Dashboard) -> None:
    """Add refusals and losses, in single numbers."""
    board.with_panel(
        single_value(
            "KV copied",
            "Bytes that splices copied, over the time range. Bad: 0 while edits are spliced.",
            Query(
                or_zero(over_range("leyline_engine_splice_bytes_total", BY_INSTANCE)), instant=True
            ),
            unit="bytes",
            thresholds=PLAIN,
        )
    )
    board.with_panel(
        single_value(
            "Refused beside claims",
            "Requests over the time range that didn't fit beside hard claims. Bad: anything but "
            "0; see *Claims and pressure*.",
            Query(or_zero(over_range("leyline_engine_refusals_total", BY_INSTANCE)), instant=True),
            unit="short",
            thresholds=FAULT_COLORS,
        )
    )
    board.with_panel(
        single_value(
            "Receipts dropped",
            "Receipts lost between the engine's processes, since its start. Bad: anything but 0; "
            "later edits can't splice from those turns.",
            Query(or_zero(total("leyline_engine_receipts_dropped_total", BY_INSTANCE))),
            unit="short",
            thresholds=FAULT_COLORS,
        )
    )


def _add_pool(board: dashboard.Dashboard) -> None:
    """Add the KV's owners."""
    board.with_row(dashboard.Row("KV pool"))
    board.with_panel(pool_by_owner())
    board.with_panel(states_by_owner())
    board.with_panel(
        time_series(
            "Peak and capacity",
            "By engine. Bad: the peak reaches the capacity soon after a start; the pool is too "
            "small for the load.",
            [
                Query(f"{PEAK}{{{BY_INSTANCE}}}", "peak {{instance}}"),
                Query(f"{CAPACITY}{{{BY_INSTANCE}}}", "capacity {{instance}}"),
            ],
            unit="short",
            width=6,
        )
    )
    evicted = "leyline_engine_evicted_tokens_total"
    retired = "leyline_engine_retired_tokens_total"
    board.with_panel(
        time_series(
            "Evicted",
            "Tokens per second that were evicted to make room, or freed at once because their "
            "session was compacted. Bad: as many are evicted as are prefilled.",
            [
                Query(per_second(evicted, BY_INSTANCE, "instance"), "{{instance}}"),
                Query(per_second(retired, BY_INSTANCE, "instance"), "{{instance}}, compacted"),
            ],
            unit="short",
            width=6,
        )
    )


def _add_work(board: dashboard.Dashboard) -> None:
    """Add the engines' work on edits."""
    board.with_row(dashboard.Row("Splices"))
    board.with_panel(
        time_series(
            "Requests by outcome",
            "Requests per minute that came with an envelope, by outcome and reason. Bad: any "
            "reason but spliced, reprefilled, not_worth_it and nothing_to_reuse.",
            [
                Query(
                    per_minute(REQUESTS, BY_INSTANCE, "outcome, reason"),
                    "{{outcome}}: {{reason}}",
                )
            ],
            unit="cpm",
            stacked=True,
        )
    )
    board.with_panel(
        time_series(
            "Tokens by kind",
            "Prompt tokens per second by the source of their KV, and slots that edits gave "
            "back (freed). Bad: prefilled as large as prefix, spliced and reused together.",
            [Query(per_second(TOKENS, BY_INSTANCE, "kind"), "{{kind}}")],
            unit="short",
            colors=KIND_COLORS,
        )
    )
    board.with_panel(
        time_series(
            "Time of a splice",
            "p50 and p90 of planning, copying and rotating. Bad: near the time that a prefill of "
            "the same tokens takes.",
            [
                Query(quantile(0.5, SPLICE, BY_INSTANCE), "p50"),
                Query(quantile(0.9, SPLICE, BY_INSTANCE), "p90"),
            ],
            unit="s",
        )
    )
    moved = "leyline_engine_splice_bytes_total"
    board.with_panel(
        time_series(
            "KV copied by splices",
            "Bytes per second over all layers. Bad: a large part of the device's bandwidth; "
            "edits are many and their suffixes long.",
            [Query(per_second(moved, BY_INSTANCE, "instance"), "{{instance}}")],
            unit="Bps",
        )
    )


def _add_registries(board: dashboard.Dashboard) -> None:
    """Add the engines' records, and the reach of forgets."""
    board.with_row(dashboard.Row("Registries and forgets"))
    gauges = {
        "retained turns": "leyline_engine_retained_turns",
        "spans in the ledger": "leyline_engine_ledger_spans",
        "lineages": "leyline_engine_lineages",
    }
    board.with_panel(
        time_series(
            "Sizes of the registries",
            "Turns retained as sources, named spans and lineages in the ledger of what may be "
            "forgotten. Bad: a size that grows for days while sessions don't.",
            [
                Query(total(metric, BY_INSTANCE, "instance"), f"{name} {{{{instance}}}}")
                for name, metric in gauges.items()
            ],
            unit="short",
            width=8,
        )
    )
    board.with_panel(
        time_series(
            "Tokens of retained turns",
            "Tokens of all turns that later ones may splice from, cached or not. Bad: many times "
            "the pool's capacity; most sources are evicted before they are used.",
            [
                Query(
                    total("leyline_engine_retained_tokens", BY_INSTANCE, "instance"), "{{instance}}"
                )
            ],
            unit="short",
            width=8,
        )
    )
    forgotten = "leyline_engine_forgotten_slots_total"
    board.with_panel(
        time_series(
            "Slots that forgets reached",
            "Per minute: overwritten; shared_retained (another session sent the same itself); "
            "pending (held by a running request when it was demanded). Bad: pending without "
            "overwritten after it.",
            [Query(per_minute(forgotten, BY_INSTANCE, "state"), "{{state}}")],
            unit="cpm",
            width=8,
        )
    )


def _add_energy(board: dashboard.Dashboard) -> None:
    """Add the engines' power, if NVML reports it."""
    board.with_row(dashboard.Row("Energy (NVML)"))
    board.with_panel(
        time_series(
            "Power",
            "Power of the engine's GPUs, from NVML; 0 or nothing without it. Bad: near the limit "
            "of the board while few tokens are generated.",
            [Query(per_second(ENERGY, BY_INSTANCE, "instance"), "{{instance}}")],
            unit="watt",
        )
    )
    board.with_panel(
        time_series(
            "Energy of a request",
            "p50 and p90. An estimate: the request's share of the energy by the tokens that were "
            "computed while it ran. Bad: rising while prompts don't; less comes from the cache.",
            [
                Query(quantile(0.5, REQUEST_ENERGY, BY_INSTANCE), "p50"),
                Query(quantile(0.9, REQUEST_ENERGY, BY_INSTANCE), "p90"),
            ],
            unit="joule",
        )
    )
