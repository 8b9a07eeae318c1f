"""Comparisons of long sequences of token ids or radix keys, at the speed of memory. Pure."""

from __future__ import annotations

from array import array

import numpy as np

_FIRST = 64
_GROWTH = 16
_LARGEST = 1 << 15
"""Elements that are compared at once: so many may be read in vain after the first that differs."""


def shared_length(
    first: array[int], second: array[int], start: int = 0, second_start: int = 0
) -> int:
    """Return how many elements ``first[start:]`` and ``second[second_start:]`` begin with alike.

    Nothing is copied, and sequences that part early are read no further.
    """
    length = min(len(first) - start, len(second) - second_start)
    if length <= 0 or (first is second and start == second_start):
        return max(0, length)
    one = np.frombuffer(first, dtype=np.int64)[start : start + length]
    other = np.frombuffer(second, dtype=np.int64)[second_start : second_start + length]
    low, portion = 0, _FIRST
    while low < length:
        differs = one[low : low + portion] != other[low : low + portion]
        at = int(differs.argmax())
        if differs[at]:
            return low + at
        low, portion = low + len(differs), min(portion * _GROWTH, _LARGEST)
    return length
