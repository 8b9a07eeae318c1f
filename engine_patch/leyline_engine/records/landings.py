"""Places of a source's tokens in a prompt that takes pieces of it. Pure."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from leyline_engine.contract import CopySegment, SpanLabel

NOWHERE = sys.maxsize

Positions = NDArray[np.int64]


def positions_of(values: Iterable[int], count: int) -> Positions:
    """Return ``count`` positions as a vector."""
    return np.fromiter(values, dtype=np.int64, count=count)


def first_readers(taken: Sequence[CopySegment], starts: Positions) -> Positions:
    """Return, per source position, the place of the first copied token that is at or after it.

    Returns:
        :data:`NOWHERE` where no copy reaches that far.
    """
    found = np.full(len(starts), NOWHERE, dtype=np.int64)
    for copy in taken:
        landing = np.where(
            starts < copy.end, copy.dest + np.maximum(0, starts - copy.start), NOWHERE
        )
        np.minimum(found, landing, out=found)
    return found


def moved_labels(
    labels: Sequence[SpanLabel], kept: Sequence[CopySegment], taken: Sequence[CopySegment]
) -> Iterator[tuple[SpanLabel, int]]:
    """Yield labels whose copied readers come before a whole place of theirs, with the first reader.

    Args:
        kept: pieces of the source that the prompt has.
        taken: those that are copied.
    """
    starts = positions_of((label.start for label in labels), len(labels))
    ends = positions_of((label.end for label in labels), len(labels))
    readers = first_readers(taken, starts)
    for at in np.flatnonzero(readers < _whole_places(kept, starts, ends)).tolist():
        yield labels[at], int(readers[at])


def _whole_places(kept: Sequence[CopySegment], starts: Positions, ends: Positions) -> Positions:
    """Return, per source extent, its first place in the prompt.

    Returns:
        :data:`NOWHERE` where no piece has all of it.
    """
    found = np.full(len(starts), NOWHERE, dtype=np.int64)
    for copy in kept:
        inside = (copy.start <= starts) & (ends <= copy.end)
        np.minimum(found, np.where(inside, copy.dest + starts - copy.start, NOWHERE), out=found)
    return found
