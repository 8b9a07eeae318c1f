"""Prometheus metrics, one registry per application, as listed in :mod:`.catalogue`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from time import perf_counter
from types import TracebackType

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from leyline_engine.contract import ReuseCounts, ReuseKind, TokenCounts

from .bounded import BoundedCounter, BoundedGauge, BoundedHistogram, LabelBounds, bound
from .catalogue import ENTRIES, CatalogueEntry
from .exposition import is_shared
from .processes import Processes, only_this_process
from .tracing import current_trace_id, stage_span

_TURN_BUCKETS = ((1, "1"), (4, "2-4"), (9, "5-9"), (19, "10-19"), (39, "20-39"))
_LAST_TURN_BUCKET = "40+"

_MOST_MET = 1024
"""Bound of tenants with their models whose series start at 0; limits their cost."""


def turn_bucket(index: int) -> str:
    """Return the label of turn ``index`` (0-based), one of a few values to keep boards cheap."""
    number = index + 1
    return next((label for last, label in _TURN_BUCKETS if number <= last), _LAST_TURN_BUCKET)


def by_source(tokens: TokenCounts) -> dict[str, int]:
    """Return a prompt's tokens by the values of the label ``source``."""
    return {
        "cached": tokens.prefix,
        "spliced": tokens.spliced,
        "reused": tokens.reused,
        "prefilled": tokens.prefilled,
    }


def exemplar(message_id: str | None = None) -> dict[str, str] | None:
    """Return a link from a measured value to its request: the trace, if there is one, else the
    message id of the turn. Neither contains the caller's text."""
    trace_id = current_trace_id()
    if trace_id is not None:
        return {"trace_id": trace_id}
    return {"message_id": message_id} if message_id is not None else None


class Metrics:
    """Every metric of the proxy. Labels hold only configured or engine-given names."""

    requests: Counter
    request_seconds: Histogram
    ttft_seconds: Histogram
    overhead_seconds: Histogram
    stage_seconds: Histogram
    queue_waiting: Gauge
    queue_running: Gauge
    queue_seconds: Histogram
    limited: Counter
    budget_used: Gauge
    budget_estimates: Counter
    budget_store_errors: Counter
    key_reloads: Counter
    tls_reloads: Counter
    tls_refused: Counter
    tls_begins: Gauge
    tls_ends: Gauge
    identity_tokens: Counter
    identity_fetches: Counter
    identity_keys_age: Gauge

    turns: Counter
    prompt_tokens: Counter
    reuse_tokens: Counter
    reuse_gated: Counter
    completion_tokens: Counter
    freed_tokens: Counter
    receipts_missing: Counter
    kept_states: Counter
    lineages: Counter
    directives: Counter
    prefill_avoided_tokens: Counter
    prefill_avoided_seconds: Counter
    cache_busts: Counter
    cache_bust_tokens: Counter
    reasoning_edit_tokens: Counter
    cache_discrepancy_tokens: Counter

    edits: Counter
    forgets: Counter
    schedule_decisions: Counter
    policy_messages: Counter
    policy_faults: Counter
    policy_refusals: Counter
    policy_reloads: Counter
    policy_completions: Counter
    policy_completion_tokens: Counter
    compactions: Counter
    policy_notes: Counter
    recalls: Counter
    recall_tokens: Counter
    recall_prefilled_tokens: Counter
    evicted_tokens: Counter
    evicted_recalled_tokens: Counter
    evicted_quoted_tokens: Counter

    upstream_up: Gauge
    engine_splices: Gauge
    engine_info: Gauge
    upstream_circuit: Gauge
    upstream_running: Gauge
    upstream_turns: Counter
    upstream_prompt_tokens: Counter
    upstream_ttft_seconds: Histogram
    failovers: Counter
    router_answers: Counter
    receipts: Counter
    erasures: Counter
    erasures_owed: Gauge
    erasures_unsaved: Gauge

    sessions: Gauge
    session_store_up: Gauge
    live_viewers: Gauge
    build_info: Gauge
    label_overflow: Counter
    audit_up: Gauge
    audit_failures: Counter
    audit_stream_failures: Counter
    warm_start_runs: Counter
    warm_start_tokens: Counter
    warm_start_files: Counter
    recall_store_up: Gauge
    recall_store_errors: Counter
    recall_store_entries: Gauge
    recall_store_bytes: Gauge
    recall_forgets_owed: Gauge

    claim_state: Gauge
    claim_resident_tokens: Gauge
    claim_hits: Gauge
    claim_age_seconds: Gauge
    claim_pressure: Gauge
    claims: Gauge
    claims_required_tokens: Gauge
    claims_resident_tokens: Gauge
    claim_events: Counter
    claim_events_missed: Counter
    claim_refusals: Counter

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self.shared = is_shared()
        """True if other processes count into the same series, which then never end."""
        if not self.shared:
            self.registry.register(Processes(only_this_process))
        self._watched: list[tuple[Gauge, Callable[[], float]]] = []
        bounds = LabelBounds(lambda label: self.label_overflow.labels(label).inc())
        for entry in ENTRIES:
            setattr(self, entry.attribute, _metric(entry, self.registry, bounds, self.shared))
        self._met: set[tuple[str, str]] = set()
        self._starting: dict[tuple[str, ...], list[CatalogueEntry]] = defaultdict(list)
        for entry in ENTRIES:
            if entry.starts:
                self._starting[entry.met_by].append(entry)
        self._start()

    def watch_replica(
        self, name: str, *, running: Callable[[], int], circuit_open: Callable[[], bool]
    ) -> None:
        """Register an engine's gauges, which are read on request."""
        self._start(upstream=name)
        self._watched.append((self.upstream_running.labels(name), running))
        self._watched.append((self.upstream_circuit.labels(name), circuit_open))

    def observe(self) -> None:
        """Update the gauges that are read on request.

        ``Gauge.set_function`` would do that by itself, but not if other processes expose them.
        """
        for gauge, value in self._watched:
            gauge.set(value())

    def meet(self, tenant: str, model: str) -> None:
        """Start the series of a tenant and a model at 0, before they count anything."""
        if (tenant, model) in self._met or len(self._met) >= _MOST_MET:
            return
        self._met.add((tenant, model))
        self._start(tenant=tenant)
        self._start(model=model)
        self._start(tenant=tenant, model=model)

    def _start(self, **met: str) -> None:
        for entry in self._starting.get(tuple(met), ()):
            for values in entry.starts:
                getattr(self, entry.attribute).labels(*met.values(), *values)

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Measure one stage of a chat turn; in a traced request it is also a span."""
        return _Stage(self.stage_seconds.labels(name), stage_span(name))

    def count_tokens(
        self, tenant: str, model: str, upstream: str, tokens: TokenCounts, turn: int
    ) -> None:
        """Add one turn's prompt tokens and freed slots."""
        bucket = turn_bucket(turn)
        for source, count in by_source(tokens).items():
            self.prompt_tokens.labels(tenant, model, source, bucket).inc(count)
            self.upstream_prompt_tokens.labels(upstream, source).inc(count)
        if tokens.freed:
            self.freed_tokens.labels(tenant, model).inc(tokens.freed)

    def count_reuse(self, tenant: str, model: str, counts: ReuseCounts) -> None:
        """Add the tokens of one turn whose content the engine held elsewhere, or its gating."""
        for kind in ReuseKind:
            tokens = getattr(counts, kind.value)
            if tokens:
                self.reuse_tokens.labels(tenant, model, counts.mode.value, kind.value).inc(tokens)
        if counts.gated:
            self.reuse_gated.labels(tenant, model).inc()

    def count_busts(self, tenant: str, model: str, busts: Mapping[str, int]) -> None:
        """Add the cache losses of one turn: tokens by cause."""
        for cause, count in busts.items():
            self.cache_busts.labels(tenant, model, cause).inc()
            self.cache_bust_tokens.labels(tenant, model, cause).inc(count)


class _Stage(AbstractContextManager[None]):
    """Measures the time of its block."""

    __slots__ = ("_seconds", "_span", "_started")

    def __init__(self, seconds: Histogram, span: AbstractContextManager[None]) -> None:
        self._seconds = seconds
        self._span = span

    def __enter__(self) -> None:
        self._started = perf_counter()
        self._span.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._span.__exit__(kind, error, traceback)
        self._seconds.observe(perf_counter() - self._started)


def _metric(
    entry: CatalogueEntry, registry: CollectorRegistry, bounds: LabelBounds, shared: bool
) -> Counter | Gauge | Histogram:
    spec = entry.spec
    made: BoundedCounter | BoundedGauge | BoundedHistogram
    if spec.kind == "counter":
        made = BoundedCounter(spec.name, spec.help, spec.labels, registry=registry)
    elif spec.kind == "gauge":
        made = BoundedGauge(
            spec.name, spec.help, spec.labels, registry=registry, multiprocess_mode=entry.merge
        )
    else:
        made = BoundedHistogram(
            spec.name, spec.help, spec.labels, registry=registry, buckets=spec.buckets
        )
    bound(made, bounds, removes=not shared)
    return made
