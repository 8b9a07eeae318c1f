"""The proxy as a service: requests, its own time, queues, and the engines as it sees them."""

from __future__ import annotations

from frame import frame
from grafana_foundation_sdk.builders import dashboard
from panels import Query, single_value, table, time_series
from queries import (
    BY_BOTH,
    BY_TENANT,
    BY_UPSTREAM,
    or_zero,
    over_range,
    per_minute,
    per_second,
    quantile,
    share,
    total,
)

from boards import budgets, processes, stores, upstreams

PLAIN = ((None, "blue"),)
FAULT_COLORS = ((None, "green"), (1, "red"))
UP_COLORS = ((None, "red"), (1, "green"))
ERROR_COLORS = ((None, "green"), (0.01, "orange"), (0.05, "red"))
YES_NO = {"0": "no", "1": "yes"}

REQUESTS = "leyline_requests_total"
AUDIT = "leyline_audit_failures_total"
AUDIT_STREAM = "leyline_audit_stream_failures_total"


def build() -> dashboard.Dashboard:
    """The board *Leyline / Proxy*."""
    board = frame(
        "proxy",
        "Proxy",
        "Requests, latency, queues and engines as the proxy sees them.",
        ("tenant", "model", "upstream"),
    )
    for add_row in (
        _add_now,
        _add_store,
        processes.add_memory,
        _add_requests,
        _add_time,
        _add_admission,
        budgets.add_budgets,
        upstreams.add_engines,
        upstreams.add_comparison,
        processes.add_processes,
        _add_state,
    ):
        add_row(board)
    return board


def _add_now(board: dashboard.Dashboard) -> None:
    """Add the row of single numbers."""
    board.with_row(dashboard.Row("Now"))
    board.with_panel(
        single_value(
            "Requests per minute",
            "All routes. Bad: 0 while agents should be at work.",
            Query(per_minute(REQUESTS, BY_BOTH, "")),
            unit="cpm",
            thresholds=PLAIN,
        )
    )
    board.with_panel(
        single_value(
            "Failed requests",
            "Share of requests that end with 500 or more. Bad: above 0.05, where an alert fires "
            "(LeylineErrorRate); engine down, overloaded, or refusals by claims.",
            Query(share(f'{BY_BOTH},status=~"5.."', BY_BOTH, REQUESTS)),
            unit="percentunit",
            thresholds=ERROR_COLORS,
        )
    )
    board.with_panel(
        single_value(
            "Engines up",
            "Engines that answer, counted once for each proxy. Bad: fewer than exist; 0 is an "
            "outage.",
            Query(total("leyline_upstream_up", BY_UPSTREAM)),
            unit="short",
            thresholds=UP_COLORS,
        )
    )


def _add_store(board: dashboard.Dashboard) -> None:
    """Add stored data, in single numbers."""
    board.with_panel(
        single_value(
            "Sessions",
            "Conversations in the session store; for several proxies, the largest count, because "
            "they share one. Bad: at the store's limit; older sessions are then forgotten and "
            "their next edit finds no source.",
            Query("max(leyline_sessions)"),
            unit="short",
            thresholds=PLAIN,
        )
    )
    board.with_panel(
        single_value(
            "Session store up",
            "Yes if every proxy can read and write sessions. Bad: no; an alert fires "
            "(LeylineSessionStoreDown).",
            Query("min(leyline_session_store_up)"),
            unit="none",
            thresholds=UP_COLORS,
            words=YES_NO,
        )
    )
    failures = " + ".join(or_zero(over_range(name, "")) for name in _LOSSES)
    board.with_panel(
        single_value(
            "Audit records lost",
            "Records that reached neither file nor stream in full, over the time range. Bad: "
            "anything but 0; the log has a gap (LeylineAuditFailures).",
            Query(failures, instant=True),
            unit="short",
            thresholds=FAULT_COLORS,
        )
    )


_LOSSES = (AUDIT, AUDIT_STREAM)


def _add_requests(board: dashboard.Dashboard) -> None:
    """Add the callers' results."""
    board.with_row(dashboard.Row("Requests"))
    board.with_panel(
        time_series(
            "Requests by status",
            "Requests per minute by HTTP status; 'disconnected' when the caller left first. Bad: "
            "5xx (engine down or overloaded), many 4xx (a harness whose requests are refused).",
            [Query(per_minute(REQUESTS, BY_BOTH, "status"), "{{status}}")],
            unit="cpm",
            stacked=True,
        )
    )
    board.with_panel(
        time_series(
            "Requests by tenant and route",
            "Requests per minute. Bad: one tenant whose line drops to 0, or jumps.",
            [Query(per_minute(REQUESTS, BY_BOTH, "tenant, route"), "{{tenant}}: {{route}}")],
            unit="cpm",
            stacked=True,
        )
    )
    seconds = "leyline_request_seconds"
    board.with_panel(
        time_series(
            "Time of a request by route",
            "p50 and p90 from a request's arrival to the end of its response, queue and engine "
            "included. Bad: p90 far above p50; queues, long prefills, or one slow engine.",
            [
                Query(quantile(0.5, seconds, BY_BOTH, "route"), "p50 {{route}}"),
                Query(quantile(0.9, seconds, BY_BOTH, "route"), "p90 {{route}}", exemplars=True),
            ],
            unit="s",
        )
    )
    board.with_panel(
        time_series(
            "Tokens written",
            "Completion tokens per second by tenant and model. Bad: falling while requests don't; "
            "engines are busy with prefills.",
            [
                Query(
                    per_second("leyline_completion_tokens_total", BY_BOTH, "tenant, model"),
                    "{{tenant}}: {{model}}",
                )
            ],
            unit="short",
            stacked=True,
        )
    )


def _add_time(board: dashboard.Dashboard) -> None:
    """Add the proxy's own time."""
    board.with_row(dashboard.Row("Time in the proxy"))
    overhead = "leyline_overhead_seconds"
    board.with_panel(
        time_series(
            "Overhead of a turn",
            "Time that a turn spends in the proxy itself, without queue and engine. Bad: p90 "
            "above 0.25 s, where an alert fires (LeylineProxySlow); see the stages.",
            [
                Query(quantile(0.5, overhead), "p50"),
                Query(quantile(0.9, overhead), "p90", exemplars=True),
                Query(quantile(0.99, overhead), "p99"),
            ],
            unit="s",
        )
    )
    board.with_panel(
        time_series(
            "Overhead by stage",
            "p90 of the time that the proxy itself spends on a turn, by stage. Bad: a stage that "
            "grows with the length of the sessions, or a policy slower than the engine.",
            [Query(quantile(0.9, "leyline_stage_seconds", "", "stage"), "{{stage}}")],
            unit="s",
        )
    )


def _add_admission(board: dashboard.Dashboard) -> None:
    """Add requests that wait, and requests that are refused."""
    board.with_row(dashboard.Row("Queues and limits"))
    board.with_panel(
        time_series(
            "Requests that wait and run",
            "By tenant: waiting for a place, and in progress. Bad: waiting that never goes back to "
            "0 (LeylineQueueGrowing); more engines, or a larger max_concurrent.",
            [
                Query(total("leyline_queue_waiting", BY_TENANT, "tenant"), "waiting {{tenant}}"),
                Query(total("leyline_queue_running", BY_TENANT, "tenant"), "running {{tenant}}"),
            ],
            unit="short",
            width=8,
        )
    )
    board.with_panel(
        time_series(
            "Time in the queue",
            "p90 of the time that requests waited for a place, by tenant. Bad: near "
            "queue_timeout_s, after which they are turned away.",
            [Query(quantile(0.9, "leyline_queue_seconds", BY_TENANT, "tenant"), "{{tenant}}")],
            unit="s",
            width=8,
        )
    )
    board.with_panel(
        time_series(
            "Requests over a limit",
            "Requests per minute that were refused because of a limit of their tenant. Bad: "
            "queue_full and queue_timeout for one tenant (its limits are low), or for all (the "
            "capacity is too low).",
            [
                Query(
                    per_minute("leyline_limited_requests_total", BY_TENANT, "tenant, limit"),
                    "{{tenant}}: {{limit}}",
                )
            ],
            unit="cpm",
            width=8,
        )
    )


def _add_state(board: dashboard.Dashboard) -> None:
    """Add the data that the proxy keeps, reloads and writes."""
    board.with_row(dashboard.Row("State"))
    board.with_panel(
        time_series(
            "Sessions by proxy",
            "Conversations in the session store; proxies that share one show the same. Bad: a "
            "flat top at max_sessions.",
            [Query("max by (instance) (leyline_sessions)", "{{instance}}")],
            unit="short",
            width=8,
        )
    )
    board.with_panel(
        time_series(
            "Losses",
            "Since the proxy started: audit records not written, records that didn't reach the "
            "stream, label values counted as 'other'; 1 while the audit log fails "
            "(LeylineAuditDown). Bad: any step.",
            [
                Query("1 - min by (instance) (leyline_audit_up)", "audit log fails {{instance}}"),
                Query(total(AUDIT, "", "instance"), "audit {{instance}}"),
                Query(total(AUDIT_STREAM, "", "instance"), "audit stream {{instance}}"),
                Query(total("leyline_label_overflow_total", "", "label"), "other {{label}}"),
            ],
            unit="short",
            width=8,
        )
    )
    board.with_panel(
        time_series(
            "Reloads of API keys, live pages",
            "Changes of the key file since the proxy started, loaded or refused, and open live "
            "pages. Bad: a step of refused; keys that were removed from the file still work "
            "(LeylineKeyReloadRefused).",
            [
                Query(total("leyline_key_reloads_total", "", "result"), "{{result}}"),
                Query(or_zero(total("leyline_live_viewers")), "live pages"),
            ],
            unit="short",
            width=8,
        )
    )
    _add_identity(board)
    stores.add_warm_starts(board)
    stores.add_recall_store(board)
    board.with_panel(
        table(
            "Versions",
            "The running proxies and their versions. Bad: more than one version for longer "
            "than an upgrade takes.",
            {"Proxies": Query("count by (instance, version) (leyline_build_info)", instant=True)},
            labels={"instance": "Proxy", "version": "Version"},
        )
    )


def _add_identity(board: dashboard.Dashboard) -> None:
    """Add the tokens of an identity provider."""
    board.with_panel(
        time_series(
            "Certificates",
            "Share of the lifetime that is left to the proxy's certificates, changes of their "
            "files that were refused, and handshakes with clients that failed. Bad: less than a "
            "fifth (LeylineCertificateNotRenewed), or anything refused.",
            [
                Query(
                    "min by (side) ((leyline_tls_certificate_not_after_timestamp_seconds - time()) "
                    "/ (leyline_tls_certificate_not_after_timestamp_seconds - "
                    "leyline_tls_certificate_not_before_timestamp_seconds))",
                    "lifetime left: {{side}}",
                ),
                Query(
                    total("leyline_tls_reloads_total", "", "side, result"), "{{side}} {{result}}"
                ),
                Query(total("leyline_tls_handshakes_refused_total", "", "refusal"), "{{refusal}}"),
            ],
            unit="short",
            width=12,
        )
    )
    board.with_panel(
        time_series(
            "Tokens of the identity provider",
            "Looks at callers' tokens by result, failed looks at the provider's keys, and the "
            "keys' age in hours. Bad: keys_gone, or a growing age (LeylineIdentityKeysOld).",
            [
                Query(total("leyline_identity_tokens_total", "", "result"), "{{result}}"),
                Query(total("leyline_identity_fetches_total", "", "result"), "keys {{result}}"),
                Query("max(leyline_identity_keys_age_seconds) / 3600", "keys' age, hours"),
            ],
            unit="short",
            width=12,
        )
    )
