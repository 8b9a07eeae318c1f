"""Shares and means with their intervals. Pure."""

from __future__ import annotations

from collections.abc import Sequence
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
