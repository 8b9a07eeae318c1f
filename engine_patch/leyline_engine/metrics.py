"""The counts of both engines as Prometheus series; see :data:`.contract.metrics.ENGINE_METRICS`.

Labels take values of closed vocabularies only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, Protocol

from leyline_engine.contract import ForgetCounts, Receipt
from leyline_engine.contract.metrics import ENGINE_METRICS
from leyline_engine.occupancy import PoolLevels, RegistryLevels

log = logging.getLogger(__name__)

_Counted = ParamSpec("_Counted")

_TOKEN_KINDS = ("prefix", "spliced", "reused", "prefilled", "freed")


class EngineMetrics(Protocol):
    """An engine's counts. Called on the thread that drives the engine; raises nothing."""

    @property
    def collects(self) -> bool:
        """True if the counts are used; False spares the engine work that only metrics need."""

    def request(self, receipt: Receipt) -> None:
        """Count a request that carried an envelope; once, when its final receipt is known."""

    def forgot(self, before: ForgetCounts, now: ForgetCounts) -> None:
        """Count a forget's progress since ``before``, which is all zeros the first time."""

    def refused(self) -> None:
        """Count a request that ended because it didn't fit beside hard claims."""

    def copied(self, size: int) -> None:
        """Count the bytes of KV that a splice copied."""

    def evicted(self, tokens: int) -> None:
        """Count the tokens of cached KV that were evicted to make room."""

    def retired(self, tokens: int) -> None:
        """Count the tokens of KV that was freed because no turn will continue it."""

    def receipt_dropped(self) -> None:
        """Count a dropped message to the HTTP process."""

    def pool(self, levels: PoolLevels) -> None:
        """Set the pool's slots by owner."""

    def registries(self, levels: RegistryLevels) -> None:
        """Set the sizes of the records of turns."""

    def energy(self, joules: float) -> None:
        """Count the GPUs' energy since the last call."""

    def request_energy(self, joules: float) -> None:
        """Count an ended request's estimated share of the energy."""


class NoMetrics:
    """Counts nothing."""

    @property
    def collects(self) -> bool:
        """Always False."""
        return False

    def request(self, receipt: Receipt) -> None:
        """Do nothing."""

    def forgot(self, before: ForgetCounts, now: ForgetCounts) -> None:
        """Do nothing."""

    def refused(self) -> None:
        """Do nothing."""

    def copied(self, size: int) -> None:
        """Do nothing."""

    def evicted(self, tokens: int) -> None:
        """Do nothing."""

    def retired(self, tokens: int) -> None:
        """Do nothing."""

    def receipt_dropped(self) -> None:
        """Do nothing."""

    def pool(self, levels: PoolLevels) -> None:
        """Do nothing."""

    def registries(self, levels: RegistryLevels) -> None:
        """Do nothing."""

    def energy(self, joules: float) -> None:
        """Do nothing."""

    def request_energy(self, joules: float) -> None:
        """Do nothing."""


def _harmless(count: Callable[_Counted, None]) -> Callable[_Counted, None]:
    """Log an error of a count: no request fails for it, and no rank fails alone."""

    @wraps(count)
    def counted(*args: _Counted.args, **kwargs: _Counted.kwargs) -> None:
        try:
            count(*args, **kwargs)
        except Exception:
            log.exception("%s could not be counted; requests go on", count.__name__)

    return counted


class PrometheusMetrics:
    """The series of one engine.

    Args:
        registry: a ``CollectorRegistry``; by default the process's own.
    """

    def __init__(self, registry: Any = None) -> None:
        self._series = _series_in(registry)

    @property
    def collects(self) -> bool:
        """Always True."""
        return True

    @_harmless
    def request(self, receipt: Receipt) -> None:
        """See :class:`EngineMetrics`."""
        reason = receipt.reason.value if receipt.reason is not None else "none"
        self._of("requests").labels(receipt.outcome.value, reason).inc()
        for kind in _TOKEN_KINDS:
            self._of("tokens").labels(kind).inc(getattr(receipt.tokens, kind))
        if receipt.tokens.spliced:
            self._of("splice_seconds").observe(receipt.splice_us / 1e6)

    @_harmless
    def forgot(self, before: ForgetCounts, now: ForgetCounts) -> None:
        """See :class:`EngineMetrics`."""
        for state in ("overwritten", "shared_retained", "pending"):
            # "pending" shrinks when slots are overwritten; a counter only grows.
            grown = max(0, getattr(now, state) - getattr(before, state))
            self._of("forgotten_slots").labels(state).inc(grown)

    @_harmless
    def refused(self) -> None:
        """See :class:`EngineMetrics`."""
        self._of("refusals").inc()

    @_harmless
    def copied(self, size: int) -> None:
        """See :class:`EngineMetrics`."""
        self._of("splice_bytes").inc(size)

    @_harmless
    def evicted(self, tokens: int) -> None:
        """See :class:`EngineMetrics`."""
        self._of("evicted_tokens").inc(tokens)

    @_harmless
    def retired(self, tokens: int) -> None:
        """See :class:`EngineMetrics`."""
        self._of("retired_tokens").inc(tokens)

    @_harmless
    def receipt_dropped(self) -> None:
        """See :class:`EngineMetrics`."""
        self._of("receipts_dropped").inc()

    @_harmless
    def pool(self, levels: PoolLevels) -> None:
        """See :class:`EngineMetrics`."""
        for owner, tokens in levels.by_owner().items():
            self._of("pool_tokens").labels(owner).set(tokens)
        self._of("pool_capacity_tokens").set(levels.capacity)
        self._of("pool_peak_tokens").set(levels.peak)
        for owner, slots in (("used", levels.states), ("free", levels.free_states)):
            self._of("state_slots").labels(owner).set(slots)

    @_harmless
    def registries(self, levels: RegistryLevels) -> None:
        """See :class:`EngineMetrics`."""
        self._of("retained_turns").set(levels.turns)
        self._of("retained_tokens").set(levels.tokens)
        self._of("ledger_spans").set(levels.spans)
        self._of("lineages").set(levels.lineages)

    @_harmless
    def energy(self, joules: float) -> None:
        """See :class:`EngineMetrics`."""
        self._of("energy_joules").inc(joules)

    @_harmless
    def request_energy(self, joules: float) -> None:
        """See :class:`EngineMetrics`."""
        self._of("request_energy_joules").observe(joules)

    def _of(self, name: str) -> Any:
        return self._series[f"leyline_engine_{name}"]


def _series_in(registry: Any) -> dict[str, Any]:
    """Return all series of the catalogue, by name."""
    # Its import chooses its storage: in SGLang, only after SGLang has set the directory.
    from prometheus_client import REGISTRY, Counter, Gauge, Histogram

    where = REGISTRY if registry is None else registry
    found: dict[str, Any] = {}
    for spec in ENGINE_METRICS:
        match spec.kind:
            case "counter":
                made: Any = Counter(spec.name, spec.help, spec.labels, registry=where)
            case "gauge":
                # Of several schedulers, the sum over those that are alive.
                made = Gauge(
                    spec.name,
                    spec.help,
                    spec.labels,
                    registry=where,
                    multiprocess_mode="livesum",
                )
            case "histogram":
                made = Histogram(
                    spec.name, spec.help, spec.labels, registry=where, buckets=spec.buckets
                )
        found[spec.name] = made
    return found
