"""Claims on KV, in total and one by one, and the room they leave."""

from __future__ import annotations

from frame import frame
from grafana_foundation_sdk.builders import dashboard
from panels import Query, single_value, table, time_series
from queries import (
    BY_INSTANCE,
    BY_TENANT,
    or_zero,
    over_range,
    per_minute,
    per_second,
    total,
)

from boards.pool import CAPACITY, POOL, pool_by_owner

PLAIN = ((None, "blue"),)
FAULT_COLORS = ((None, "green"), (1, "red"))
FULL_COLORS = ((None, "green"), (0.6, "orange"), (0.8, "red"))
REFUSALS = "leyline_claim_refusals_total"


def build() -> dashboard.Dashboard:
    """The board *Leyline / Claims and pressure*."""
    board = frame(
        "claims-pressure",
        "Claims and pressure",
        "Claims on the KV pool, their owners, and their cost to everybody else.",
        ("tenant", "instance"),
    )
    for add_row in (_add_now, _add_refused, _add_claims, _add_each, _add_pressure):
        add_row(board)
    return board


def _add_now(board: dashboard.Dashboard) -> None:
    """Add the row of single numbers."""
    board.with_row(dashboard.Row("Now"))
    board.with_panel(
        single_value(
            "Live claims",
            "Claims that hold or rank KV now. Bad: far more than tenants should need; each has "
            "an owner who may have forgotten it.",
            Query(or_zero(total("leyline_claims", BY_TENANT))),
            unit="short",
            thresholds=PLAIN,
        )
    )
    claimed = total(POOL, f'owner="claimed",{BY_INSTANCE}')
    board.with_panel(
        single_value(
            "Pool claimed",
            "Share of the KV pool that live claims hold. Bad: above 0.8, where an alert fires "
            "(LeylinePoolClaimed); all other sessions share the rest.",
            Query(f"{claimed} / {total(CAPACITY, BY_INSTANCE)}"),
            unit="percentunit",
            thresholds=FULL_COLORS,
        )
    )
    busy = total(POOL, f'owner=~"claimed|in_flight",{BY_INSTANCE}')
    board.with_panel(
        single_value(
            "Pool in use",
            "Share of the pool that running requests and claims hold, which nothing can evict. "
            "Bad: near 1; requests wait for room, and little cached KV survives.",
            Query(f"{busy} / {total(CAPACITY, BY_INSTANCE)}"),
            unit="percentunit",
            thresholds=FULL_COLORS,
        )
    )


def _add_refused(board: dashboard.Dashboard) -> None:
    """Add refusals and losses, in single numbers."""
    board.with_panel(
        single_value(
            "Requests refused by claims",
            "Requests over the time range that did not fit beside hard claims. Bad: anything but "
            "0 that nobody expects; release claims, give them a deadline, or enlarge the pool.",
            Query(or_zero(over_range(REFUSALS, BY_TENANT)), instant=True),
            unit="short",
            thresholds=FAULT_COLORS,
        )
    )
    resident = total("leyline_claims_resident_tokens", BY_TENANT)
    required = total("leyline_claims_required_tokens", BY_TENANT)
    board.with_panel(
        single_value(
            "Claimed tokens that are there",
            "Share of the tokens that live claims require and that are resident; more than 1 if "
            "claims hold more than they require. Bad: below 1; soft claims lost tokens.",
            Query(f"{resident} / ({required} > 0)"),
            unit="percentunit",
            thresholds=((None, "red"), (1, "green")),
        )
    )
    board.with_panel(
        single_value(
            "Events missed",
            "Events of claims that the engine dropped before the proxy fetched them, since "
            "its start. Bad: anything but 0; the events below are too few.",
            Query(or_zero(total("leyline_claim_events_missed_total"))),
            unit="short",
            thresholds=FAULT_COLORS,
        )
    )


def _add_claims(board: dashboard.Dashboard) -> None:
    """Add all claims together."""
    board.with_row(dashboard.Row("Claims"))
    kinds = "tenant, kind"
    board.with_panel(
        time_series(
            "Claims by tenant and kind",
            "Live claims: hard ones lock KV, soft ones only rank it. Bad: a line that only "
            "rises; claims are made and never released.",
            [Query(total("leyline_claims", BY_TENANT, kinds), "{{tenant}}: {{kind}}")],
            unit="short",
            width=8,
        )
    )
    board.with_panel(
        time_series(
            "Claimed tokens by tenant and kind",
            "Tokens that live claims require, and how many of these are resident. Shared tokens "
            "count for each claim. Bad: resident below required for soft claims (evicted); for "
            "hard ones this can't happen.",
            [
                Query(
                    total("leyline_claims_required_tokens", BY_TENANT, kinds),
                    "required, {{tenant}}: {{kind}}",
                ),
                Query(
                    total("leyline_claims_resident_tokens", BY_TENANT, kinds),
                    "resident, {{tenant}}: {{kind}}",
                ),
            ],
            unit="short",
            width=8,
        )
    )
    board.with_panel(
        time_series(
            "Events of claims",
            "Events per minute by kind, without those of the clock. Bad: evicted (a soft claim "
            "had to give way), lost (protected KV is gone: a forget, or an engine that "
            "restarted), request_refused.",
            [
                Query(
                    per_minute("leyline_claim_events_total", 'event!~"opened|ticked"', "event"),
                    "{{event}}",
                )
            ],
            unit="cpm",
            stacked=True,
            width=8,
        )
    )


def _add_each(board: dashboard.Dashboard) -> None:
    """Add claims one by one."""
    board.with_row(dashboard.Row("Single claims"))
    board.with_panel(
        table(
            "Live claims, one by one",
            "The 256 oldest claims at the end of the time range: tokens in the cache, "
            "requests that matched all of the claim, its age, and its pressure (requests refused "
            "and evictions turned away because of it). Bad: great age and pressure without hits; "
            "the claim costs others and serves nobody.",
            {
                "": Query(f"leyline_claim_state{{{BY_TENANT}}} == 1", instant=True),
                "Resident tokens": _of_claim("leyline_claim_resident_tokens"),
                "Hits": _of_claim("leyline_claim_hits"),
                "Age (s)": _of_claim("leyline_claim_age_seconds"),
                "Pressure": _of_claim("leyline_claim_pressure"),
            },
            labels={"tenant": "Tenant", "claim": "Claim", "kind": "Kind", "state": "State"},
        )
    )


def _of_claim(metric: str) -> Query:
    """Return a gauge of each claim, with its kind and state, so that rows can be merged."""
    state = f"leyline_claim_state{{{BY_TENANT}}}"
    return Query(
        f"{metric}{{{BY_TENANT}}} * on (job, instance, tenant, claim)"
        f" group_left (kind, state) ({state} == 1)",
        instant=True,
    )


def _add_pressure(board: dashboard.Dashboard) -> None:
    """Add the pool's fill, and its effects."""
    board.with_row(dashboard.Row("Pressure"))
    board.with_panel(pool_by_owner())
    board.with_panel(
        time_series(
            "Evictions",
            "Tokens per second that engines evicted from the cache to make room. Bad: as many as "
            "are prefilled; evicted tokens are computed again soon after.",
            [
                Query(
                    per_second("leyline_engine_evicted_tokens_total", BY_INSTANCE, "instance"),
                    "{{instance}}",
                )
            ],
            unit="short",
        )
    )
    board.with_panel(
        time_series(
            "Refusals by tenant",
            "Turns per minute that were refused because they didn't fit beside hard claims, by "
            "the tenant whose turn it was. Bad: above 1 in 100 turns, where an alert fires "
            "(LeylineClaimRefusals).",
            [Query(per_minute(REFUSALS, BY_TENANT, "tenant"), "{{tenant}}")],
            unit="cpm",
        )
    )
    board.with_panel(
        time_series(
            "Refusals by engine",
            "Requests per minute that engines refused, or ended early, beside hard claims, "
            "including requests that bypass this proxy. Bad: anything but 0.",
            [
                Query(
                    per_minute("leyline_engine_refusals_total", BY_INSTANCE, "instance"),
                    "{{instance}}",
                )
            ],
            unit="cpm",
        )
    )
