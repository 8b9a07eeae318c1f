"""The types of the catalogue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from leyline_engine.contract.metrics import MetricSpec

Merge = Literal["livesum", "livemax", "livemin", "livemostrecent"]
"""Way to combine a gauge of several workers: see prometheus_client's multiprocess modes."""

LATENCY = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
SHORT = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One metric of the proxy."""

    attribute: str
    """Name of the attribute of :class:`~leyline_proxy.telemetry.metrics.Metrics`."""
    spec: MetricSpec
    merge: Merge = "livemostrecent"
    """Combination of several workers' values, for gauges."""
    starts: tuple[tuple[str, ...], ...] = ()
    """Values of the last labels whose series start at 0 before anything is counted, which makes the
    first event an increase: at once, or when values of the earlier labels are first met."""

    @property
    def met_by(self) -> tuple[str, ...]:
        """The labels before those of :attr:`starts`."""
        return self.spec.labels[: len(self.spec.labels) - len(self.starts[0])]


@dataclass(frozen=True, slots=True)
class Group:
    """Metrics that are read together."""

    title: str
    about: str
    entries: tuple[CatalogueEntry, ...]


def _name(attribute: str, name: str) -> str:
    return name or f"leyline_{attribute}"


def counter(
    attribute: str,
    text: str,
    labels: tuple[str, ...] = (),
    *,
    name: str = "",
    bad: str = "",
    starts: tuple[tuple[str, ...], ...] = (),
) -> CatalogueEntry:
    """Return a counter; ``_total`` is added to its exposed name.

    Args:
        name: of the metric, if it isn't ``leyline_`` and the attribute's.
    """
    return CatalogueEntry(
        attribute,
        MetricSpec(_name(attribute, name), "counter", text, labels, bad=bad),
        starts=starts,
    )


def gauge(
    attribute: str,
    text: str,
    labels: tuple[str, ...] = (),
    *,
    name: str = "",
    merge: Merge,
    bad: str = "",
) -> CatalogueEntry:
    """Return a gauge; see :func:`counter`."""
    return CatalogueEntry(
        attribute, MetricSpec(_name(attribute, name), "gauge", text, labels, bad=bad), merge
    )


def histogram(
    attribute: str,
    text: str,
    labels: tuple[str, ...] = (),
    *,
    name: str = "",
    buckets: tuple[float, ...] = LATENCY,
    bad: str = "",
) -> CatalogueEntry:
    """Return a histogram of seconds; see :func:`counter`."""
    return CatalogueEntry(
        attribute, MetricSpec(_name(attribute, name), "histogram", text, labels, buckets, bad)
    )
