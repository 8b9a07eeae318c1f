"""Shares, means and paired differences with their intervals. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev

from leyline_lab.fidelity.experiment import Estimate

_Z = 1.959963984540054
"""Two-sided 95 % point of the normal distribution."""


def share(successes: int, count: int) -> Estimate:
    """Return a share with Wilson's score interval (Wilson 1927).

    Raises:
        ValueError: there is no case.
    """
    if count <= 0 or not 0 <= successes <= count:
        raise ValueError(f"{successes} of {count} is no share")
    part, square = successes / count, _Z * _Z
    centre = (part + square / (2 * count)) / (1 + square / count)
    half = _Z * sqrt(part * (1 - part) / count + square / (4 * count * count))
    half /= 1 + square / count
    # Rounding must not put an end beyond the share.
    return Estimate(
        part, max(0.0, min(part, centre - half)), min(1.0, max(part, centre + half)), count
    )


def mean(values: Sequence[float]) -> Estimate:
    """Return a mean with the normal interval of its standard error; a single value has no width.

    Raises:
        ValueError: there is no value.
    """
    if not values:
        raise ValueError("no value has no mean")
    middle = fmean(values)
    half = _Z * stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0
    return Estimate(middle, middle - half, middle + half, len(values))


def difference(first: Sequence[bool], second: Sequence[bool]) -> Estimate:
    """Return ``first - second`` of paired shares, with the interval of the paired differences.

    Raises:
        ValueError: the two have different lengths, or no case.
    """
    pairs = zip(first, second, strict=True)
    return mean([float(one) - float(other) for one, other in pairs])


@dataclass(frozen=True, slots=True)
class Paired:
    """Two arms on the same tasks."""

    pairs: int
    wins: int
    """Pairs that only the arm solved."""
    losses: int
    """Pairs that only the baseline solved."""
    difference: Estimate
    """Share solved by the arm less that of the baseline."""


def paired(arm: Sequence[bool], baseline: Sequence[bool]) -> Paired:
    """Compare two arms, pair by pair.

    The interval is Newcombe's for paired shares from score intervals (Newcombe 1998, method 10). It
    treats pairs as independent; repeats of one task aren't quite.

    Raises:
        ValueError: the two have different lengths, or no pair.
    """
    counts = {(one, other): 0 for one in (True, False) for other in (True, False)}
    for one, other in zip(arm, baseline, strict=True):
        counts[one, other] += 1
    both, wins = counts[True, True], counts[True, False]
    losses, neither = counts[False, True], counts[False, False]
    count = both + wins + losses + neither
    first, second = share(both + wins, count), share(both + losses, count)
    phi = _correlation(both, wins, losses, neither)
    low = _distance(first.value - first.low, second.high - second.value, phi)
    high = _distance(first.high - first.value, second.value - second.low, phi)
    apart = (wins - losses) / count
    ends = max(-1.0, apart - low), min(1.0, apart + high)
    return Paired(count, wins, losses, Estimate(apart, *ends, count))


def _distance(one: float, other: float, phi: float) -> float:
    return sqrt(max(0.0, one * one - 2 * phi * one * other + other * other))


def _correlation(both: int, wins: int, losses: int, neither: int) -> float:
    """Return the phi coefficient, corrected for continuity as Newcombe does where it is above 0."""
    product = (both + wins) * (losses + neither) * (both + losses) * (wins + neither)
    if product == 0:
        return 0.0
    cross = float(both * neither - wins * losses)
    if cross > 0:
        cross = max(cross - (both + wins + losses + neither) / 2, 0.0)
    return cross / sqrt(product)
