"""Shares and paired differences with their intervals. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from leyline_lab.fidelity.statistics import share


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with the ends of its two-sided 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Paired:
    """Two arms on the same tasks."""

    pairs: int
    wins: int
    """Pairs that only the arm solved."""
    losses: int
    """Pairs that only the baseline solved."""
    difference: Interval
    """Share solved by the arm less that of the baseline."""


def wilson(solved: int, count: int) -> Interval:
    """Return a share with Wilson's score interval (Wilson 1927).

    Raises:
        ValueError: there is no case, or more solved than there are.
    """
    found = share(solved, count)
    return Interval(found.value, found.low, found.high)


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
    first, second = wilson(both + wins, count), wilson(both + losses, count)
    phi = _correlation(both, wins, losses, neither)
    low = _distance(first.value - first.low, second.high - second.value, phi)
    high = _distance(first.high - first.value, second.value - second.low, phi)
    difference = (wins - losses) / count
    ends = max(-1.0, difference - low), min(1.0, difference + high)
    return Paired(count, wins, losses, Interval(difference, *ends))


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
