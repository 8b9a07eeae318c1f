"""The parts of a prompt's gaps in which a request takes content. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from leyline_engine.contract import Extent, joined


def clipped(gaps: Iterable[Extent], within: Iterable[Extent], shortest: int) -> Iterator[Extent]:
    """Yield the parts of gaps that are in ``within``, in order.

    Args:
        gaps: sorted and disjoint.
        within: sorted and disjoint; extents that meet count as one.
        shortest: shorter parts are left out.
    """
    allowed = joined(within)
    at = 0
    for begin, stop in gaps:
        while at < len(allowed) and allowed[at][1] <= begin:
            at += 1
        for start, end in allowed[at:]:
            if start >= stop:
                break
            part = max(begin, start), min(stop, end)
            if part[1] - part[0] >= shortest:
                yield part
