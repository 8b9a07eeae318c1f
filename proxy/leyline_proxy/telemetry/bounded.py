"""Metrics whose labels are bounded, and whose series are found without a lock.

A label's value that exceeds the bound, or is far too long, becomes ``other``, and is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from threading import Lock
from typing import Any, TypeVar

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.samples import Sample

OTHER = "other"

MOST_VALUES = 64
"""Bound for labels that :data:`CAPS` doesn't name."""

LONGEST_VALUE = 256

CAPS: Mapping[str, int | None] = {
    "tenant": 4096,
    "upstream": 1024,
    "model": 256,
    "policy": 256,
    "kind": 128,
    # Series of claims end with them; at most some hundred are shown at a time.
    "claim": None,
}
"""Largest number of a label's values in a process's life; None if bounded elsewhere."""

B = TypeVar("B", bound="_Bounded")


class LabelBounds:
    """Counts the values of labels, over all metrics.

    Args:
        overflown: called with the label's name for each replaced value.
    """

    def __init__(self, overflown: Callable[[str], None] = lambda _: None) -> None:
        self._overflown = overflown
        self._seen: dict[str, set[str]] = {}
        self._lock = Lock()

    def admitted(self, name: str, value: str) -> str:
        """Return ``value``, or ``other`` in its place."""
        if self.shown(name, value) == value:
            return value
        cap = CAPS.get(name, MOST_VALUES)
        with self._lock:
            seen = self._seen.setdefault(name, set())
            fits = len(value) <= LONGEST_VALUE and (cap is None or len(seen) < cap)
            if fits or value in seen:
                seen.add(value)
                return value
        self._overflown(name)
        return OTHER

    def shown(self, name: str, value: str) -> str:
        """Return the value under which the series of ``value`` are shown."""
        free = CAPS.get(name, MOST_VALUES) is None and len(value) <= LONGEST_VALUE
        known = value == OTHER or value in self._seen.get(name, ())
        return value if free or known else OTHER


class _Bounded(MetricWrapperBase):
    """The common part of all kinds of metrics. Children have the same class but use none of it."""

    bounds = LabelBounds()
    removes = True
    """True if series can end; False if other processes read them."""
    known: dict[tuple[object, ...], Any] = {}  # noqa: RUF012 - each parent gets its own

    def labels(self: B, *values: object, **named: object) -> B:
        """Return the series of these label values."""
        found: B | None = self.known.get(values) if values else None
        if found is not None:
            return found
        if named:
            if set(named) != set(self._labelnames):
                raise ValueError("Incorrect label names")
            values = tuple(named[name] for name in self._labelnames)
        given = tuple(map(str, values))
        # The library refuses too few or too many.
        admitted = (
            tuple(map(self.bounds.admitted, self._labelnames, given))
            if len(given) == len(self._labelnames)
            else given
        )
        child: B = MetricWrapperBase.labels(self, *admitted)
        if admitted == values:  # replaced values must not be remembered either
            self.known[values] = child
        return child

    def remove(self, *values: Any) -> None:
        """End a series; one that can't end is set to 0."""
        shown = tuple(map(self.bounds.shown, self._labelnames, map(str, values)))
        if not self.removes:
            if isinstance(self, Gauge) and shown in self._metrics:
                self.labels(*shown).set(0)
            return
        self.known.pop(shown, None)
        super().remove(*shown)

    def _child_samples(self) -> Iterable[Sample]:
        # The time of creation would be another series.
        return [sample for sample in super()._child_samples() if sample.name != "_created"]


class BoundedCounter(_Bounded, Counter):
    """A counter with bounded labels."""


class BoundedGauge(_Bounded, Gauge):
    """A gauge with bounded labels."""


class BoundedHistogram(_Bounded, Histogram):
    """A histogram with bounded labels."""


def bound(metric: _Bounded, bounds: LabelBounds, *, removes: bool) -> None:
    """Give a metric its bounds.

    Args:
        removes: see :class:`_Bounded`.
    """
    metric.bounds, metric.removes, metric.known = bounds, removes, {}
