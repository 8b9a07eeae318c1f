"""What both engines count, and its Prometheus series; see :data:`.contract.metrics.ENGINE_METRICS`.

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

_TOKEN_KINDS = ("prefix", "spliced", "prefilled", "freed")


class EngineMetrics(Protocol):
    """What an engine counts. Called on the thread that drives the engine; raises nothing."""

    @property
    def collects(self) -> bool:
        """Whether anything comes of it; False spares the engine what only metrics need."""

    def request(self, receipt: Receipt) -> None:
        """A request that carried an envelope; once, when its final receipt is known."""

    def forgot(self, before: ForgetCounts, now: ForgetCounts) -> None:
        """How far a forget has come since ``before``; all zeros before the first time."""

    def refused(self) -> None:
        """A request ended because it didn't fit beside hard claims."""

    def copied(self, size: int) -> None:
        """A splice copied so many bytes of KV."""

    def evicted(self, tokens: int) -> None:
        """So much cached KV went to make room."""

    def receipt_dropped(self) -> None:
        """A message to the HTTP process was dropped."""

    def pool(self, levels: PoolLevels) -> None:
        """Whose the pool's slots are now."""

    def registries(self, levels: RegistryLevels) -> None:
        """How much is remembered of turns now."""

    def energy(self, joules: float) -> None:
        """The GPUs used so much since the last time."""

    def request_energy(self, joules: float) -> None:
        """An ended request's share of that, estimated."""


class NoMetrics:
    """Nothing is counted."""

    @property
    def collects(self) -> bool:
        """Always False."""
        return False

    def request(self, receipt: Receipt) -> None:
        """Nothing."""

    def forgot(self, before: ForgetCounts, now: ForgetCounts) -> None:
        """Nothing."""

    def refused(self) -> None:
        """Nothing."""

    def copied(self, size: int) -> None:
        """Nothing."""

    def evicted(self, tokens: int) -> None:
        """Nothing."""

    def receipt_dropped(self) -> None:
        """Nothing."""

    def pool(self, levels: PoolLevels) -> None:
        """Nothing."""

    def registries(self, levels: RegistryLevels) -> None:
        """Nothing."""

    def energy(self, joules: float) -> None:
        """Nothing."""

    def request_energy(self, joules: float) -> None:
        """Nothing."""


def _harmless(count: Callable[_Counted, None]) -> Callable[_Counted, None]:
    """What can't be counted is logged: no request fails for it, and no rank alone."""

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
    """All series of the catalogue, by name."""
    # Chooses its storage when it is imported: in SGLang, only after that has set the directory.
    from prometheus_client import REGISTRY, Counter, Gauge, Histogram

    where = REGISTRY if registry is None else registry
    found: dict[str, Any] = {}
    for spec in ENGINE_METRICS:
        match spec.kind:
            case "counter":
                made: Any = Counter(spec.name, spec.help, spec.labels, registry=where)
            case "gauge":
                # Of several schedulers, what those have that are alive.
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
