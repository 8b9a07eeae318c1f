"""The copies of a turn whose rows may be turned, in a pool whose as-computed keys may give way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from leyline_engine.contract import CopySegment
from leyline_engine.rows.pool import SplicePool


def turnable_copies(
    pool: SplicePool, copies: Sequence[CopySegment], sources: Sequence[torch.Tensor]
) -> tuple[CopySegment, ...]:
    """Return the parts of copies that can be made; what is between them is to be prefilled.

    Args:
        pool: asked once, for all rows.
        copies: sorted by destination. What they have beyond the slots of a source stays.
        sources: slots of each source, int64, in position order.
    """
    moving = [copy for copy in copies if copy.start != copy.dest]
    slots = [sources[copy.source][copy.start : copy.end] for copy in moving]
    turnable = pool.turnable(torch.cat(slots)) if slots else None
    if turnable is None:
        return tuple(copies)
    rows = iter(torch.split(turnable, [len(part) for part in slots]))
    found: list[CopySegment] = []
    for copy in copies:
        found += [copy] if copy.start == copy.dest else _parts(copy, next(rows).tolist())
    return tuple(found)


def _parts(copy: CopySegment, turnable: Sequence[bool]) -> Iterator[CopySegment]:
    """Yield the parts of a copy whose rows are turnable; rows without an answer are."""
    may = [*turnable, *[True] * (copy.length - len(turnable))]
    begin = None
    for at, good in enumerate([*may, False]):
        if good and begin is None:
            begin = at
        elif not good and begin is not None:
            yield CopySegment(copy.source, copy.start + begin, copy.start + at, copy.dest + begin)
            begin = None
