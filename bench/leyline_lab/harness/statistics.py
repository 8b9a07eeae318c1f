"""Times of repeated calls, and what is read from many of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter


def times(work: Callable[[], object], repeat: int) -> list[float]:
    """Return the seconds of each call."""
    found = []
    for _ in range(repeat):
        began = perf_counter()
        work()
        found.append(perf_counter() - began)
    return found


def percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile, interpolated between its two neighbours."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, and the order statistics that enclose the true one with 95 %."""
    ordered, count = sorted(values), len(values)
    spread = 0.98 * math.sqrt(count)  # 1.96 standard deviations of a Binomial(n, ½), halved
    low, high = max(0, int(count / 2 - spread)), min(count - 1, int(count / 2 + spread))
    return median(ordered), ordered[low], ordered[high]
