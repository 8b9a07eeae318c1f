"""The comparison of token sequences from a common place on."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_BLOCK = 256


def agreement(first: NDArray[np.int64], second: NDArray[np.int64]) -> int:
    """Return how many leading elements agree."""
    length = min(len(first), len(second))
    at, block = 0, _BLOCK
    while at < length:
        stop = min(at + block, length)
        differ = first[at:stop] != second[at:stop]
        if differ.any():
            return at + int(differ.argmax())
        at, block = stop, 2 * block
    return length
