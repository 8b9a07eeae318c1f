"""Requests, their latency, and their way into the proxy."""

from __future__ import annotations

from ...errors import QueueFullError, QueueTimeoutError, RateLimitError
from ...model.tls import TlsRefusal, TlsSide
from ...model.token_results import Result
from .entries import SHORT, CatalogueEntry, Group, counter, gauge, histogram

_REQUESTS: tuple[CatalogueEntry, ...] = (
    counter(
        "requests",
        "Requests by HTTP status, or 'disconnected'.",
        ("tenant", "model", "route", "status"),
        bad="A rising share of 5xx: engines fail or can't be reached. 429: limits of tenants.",
    ),
    histogram(
        "request_seconds",
        "Time from a request's arrival to the end of its response.",
        ("tenant", "model", "route"),
    ),
    histogram(
        "ttft_seconds",
        "Time from a chat request's arrival to its first token, or to its end if not streamed.",
        ("tenant", "model", "outcome"),
        bad="Long for 'reprefilled' compared with 'spliced': edits cost the cache. Long for all: "
        "the engine is busy, or requests wait for a place.",
    ),
    histogram(
        "overhead_seconds",
        "Time that a chat turn spends in the proxy itself: reading, policies, planning and "
        "accounting, without the wait for a place or for an engine.",
        buckets=SHORT,
        bad="Above some tens of milliseconds: one stage is slow (see leyline_stage_seconds), or "
        "the proxy's CPU is saturated.",
    ),
    histogram(
        "stage_seconds",
        "Time that the proxy itself spends on a chat turn, by stage.",
        ("stage",),
        buckets=SHORT,
    ),
)

_ADMISSION: tuple[CatalogueEntry, ...] = (
    gauge(
        "queue_waiting",
        "Requests that wait for a place.",
        ("tenant",),
        merge="livesum",
        bad="Above 0 for a long time: more requests come than max_concurrent admits.",
    ),
    gauge(
        "queue_running",
        "Requests that have a place and are in progress.",
        ("tenant",),
        merge="livesum",
    ),
    histogram(
        "queue_seconds",
        "Time that requests waited for a place before they were forwarded.",
        ("tenant",),
    ),
    counter(
        "limited",
        "Requests that were refused because of a limit of their tenant, by limit.",
        ("tenant", "limit"),
        name="leyline_limited_requests",
        starts=(
            (RateLimitError.code,),
            (QueueFullError.code,),
            (QueueTimeoutError.code,),
            ("budget_exceeded",),
        ),
    ),
    counter(
        "key_reloads",
        "Changes of the key file, loaded or refused.",
        ("result",),
        bad="'refused': the file is wrong, and the previous keys apply; the log shows where.",
        starts=(("loaded",), ("refused",)),
    ),
    counter(
        "tls_reloads",
        "Changes of the files of certificates, loaded or refused, by the connections that they "
        "serve: those of clients, or those to engines.",
        ("side", "result"),
        bad="'refused': a file is wrong, or half written for long, and the previous certificate "
        "serves until it expires; the log shows why.",
        starts=tuple((side, result) for side in TlsSide for result in ("loaded", "refused")),
    ),
    counter(
        "tls_refused",
        "TLS handshakes with clients that failed, by the reason.",
        ("refusal",),
        name="leyline_tls_handshakes_refused",
        bad="Growing: clients show no certificate, an old one or one of another authority, don't "
        "trust the proxy's, or call `http://`.",
        starts=tuple((refusal,) for refusal in TlsRefusal),
    ),
    gauge(
        "tls_begins",
        "Time from which the proxy's certificate in use is valid.",
        ("side",),
        name="leyline_tls_certificate_not_before_timestamp_seconds",
        merge="livemin",
    ),
    gauge(
        "tls_ends",
        "Time at which the proxy's certificate in use expires.",
        ("side",),
        name="leyline_tls_certificate_not_after_timestamp_seconds",
        bad="Less than a fifth of its lifetime left, and less than 14 days: nobody renews it.",
        merge="livemin",
    ),
    counter(
        "identity_tokens",
        "Tokens of the identity provider that were looked at, by result. One that is known already "
        "isn't looked at again.",
        ("result",),
        bad="'keys_gone': the provider can't be reached, and its keys are too old. 'not_yet' or "
        "'expired' of many callers: a clock is wrong. 'unknown_key' often: made-up tokens.",
        starts=tuple((each.value,) for each in Result),
    ),
    counter(
        "identity_fetches",
        "Looks at the identity provider's keys.",
        ("result",),
        bad="'failed': tokens are refused (503) once the last good keys are older than "
        "oidc_keys_max_age_s.",
        starts=(("read",), ("failed",)),
    ),
    gauge(
        "identity_keys_age",
        "Time since the identity provider's keys were last read; 0 before that, and without a "
        "provider.",
        name="leyline_identity_keys_age_seconds",
        bad="Near oidc_keys_max_age_s: the provider can't be reached.",
        merge="livemax",
    ),
)

_BUDGETS: tuple[CatalogueEntry, ...] = (
    gauge(
        "budget_used",
        "Used share of a tenant's budget in its present window, by window and unit; as this "
        "process last saw it.",
        ("tenant", "window", "unit"),
        name="leyline_budget_used_ratio",
        bad="Above 0.9: requests will soon be refused (429) until the window ends.",
        merge="livemax",
    ),
    counter(
        "budget_estimates",
        "Charges of budgets that are estimates, because nobody reported the usage, by reason.",
        ("reason",),
        bad="'no_usage' of more than a few: an engine reports no usage.",
        starts=(("left",), ("broken",), ("no_usage",), ("other_path",), ("died",)),
    ),
    counter(
        "budget_store_errors",
        "Failed operations of the store of budgets, by result: 'open' a request was admitted by "
        "what the process knows, 'closed' it was refused, 'owed' a charge waits for the store.",
        ("result",),
        bad="Above 0: Redis can't be reached. Nothing is lost unless the proxy stops meanwhile, "
        "but with 'open' several proxies together may exceed a budget.",
        starts=(("open",), ("closed",), ("owed",)),
    ),
)

GROUPS = (
    Group("Requests and latency", "Every request that the proxy answers.", _REQUESTS),
    Group("Admission", "The fair queue, the tenants' limits, and their keys.", _ADMISSION),
    Group("Budgets", "What tenants use of their budgets.", _BUDGETS),
)
