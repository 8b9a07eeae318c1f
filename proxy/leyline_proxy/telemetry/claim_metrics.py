"""Metrics of claims: a few series for each live one, sums for all, events by kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from typing import Any

from leyline_engine.contract import ClaimStatus

from .metrics import Metrics

MAX_SERIES = 256
"""Number of claims with their own series, the oldest; the others are in the sums."""

OTHER_TENANT = "other"
"""Label of tenants unknown to this proxy: another one shares its engine."""

_Labels = tuple[str, str]


class ClaimMetrics:
    """Keeps the series of claims.

    Args:
        tenants: names that may be labels.
    """

    def __init__(self, metrics: Metrics, tenants: Container[str]) -> None:
        self._metrics = metrics
        self._tenants = tenants
        self._live: dict[str, Sequence[ClaimStatus]] = {}
        """Live claims by the engine that reported them."""
        self._shown: dict[_Labels, tuple[str, str]] = {}
        """Kind and state of the claims that have series."""
        self._summed: set[_Labels] = set()
        # Series that never end would become as many as all claims ever made.
        self._most = 0 if metrics.shared else MAX_SERIES

    def publish(self, engine: str, told: Sequence[ClaimStatus]) -> None:
        """Show exactly these live claims of an engine.

        Args:
            engine: its name.
        """
        self._live[engine] = told
        live = [status for of_engine in self._live.values() for status in of_engine]
        self._sum(live)
        found = {self._labels(status): status for status in live}
        for labels in [labels for labels in self._shown if labels not in found]:
            self._remove(labels)
        for labels, status in found.items():
            if labels in self._shown or len(self._shown) < self._most:
                self._show(labels, status)

    def count(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Add events of the engine."""
        for kind, number in Counter(str(event.get("event")) for event in events).items():
            self._metrics.claim_events.labels(kind).inc(number)

    def _sum(self, live: Sequence[ClaimStatus]) -> None:
        metrics = self._metrics
        number: Counter[_Labels] = Counter()
        required: Counter[_Labels] = Counter()
        resident: Counter[_Labels] = Counter()
        for status in live:
            labels = self._tenant(status), status.claim.kind.value
            number[labels] += 1
            required[labels] += status.required_tokens
            resident[labels] += status.resident_tokens
        # Former series remain, at 0: an ended series isn't a zero for Prometheus.
        self._summed |= number.keys()
        for labels in self._summed:
            metrics.claims.labels(*labels).set(number[labels])
            metrics.claims_required_tokens.labels(*labels).set(required[labels])
            metrics.claims_resident_tokens.labels(*labels).set(resident[labels])

    def _show(self, labels: _Labels, status: ClaimStatus) -> None:
        metrics = self._metrics
        stands = status.claim.kind.value, status.state.value
        before = self._shown.get(labels)
        if before is not None and before != stands:
            metrics.claim_state.remove(*labels, *before)
        self._shown[labels] = stands
        metrics.claim_state.labels(*labels, *stands).set(1)
        metrics.claim_resident_tokens.labels(*labels).set(status.resident_tokens)
        metrics.claim_hits.labels(*labels).set(status.hits)
        metrics.claim_age_seconds.labels(*labels).set(status.age_ms / 1000)
        metrics.claim_pressure.labels(*labels).set(status.pressure)

    def _remove(self, labels: _Labels) -> None:
        metrics = self._metrics
        metrics.claim_state.remove(*labels, *self._shown.pop(labels))
        for gauge in (
            metrics.claim_resident_tokens,
            metrics.claim_hits,
            metrics.claim_age_seconds,
            metrics.claim_pressure,
        ):
            gauge.remove(*labels)

    def _labels(self, status: ClaimStatus) -> _Labels:
        return self._tenant(status), status.claim.id

    def _tenant(self, status: ClaimStatus) -> str:
        tenant = status.claim.tenant
        return tenant if tenant in self._tenants else OTHER_TENANT
