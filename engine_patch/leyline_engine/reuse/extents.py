"""Half-open token extents of a prompt: merged where they meet, and one list clipped to another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

Extent = tuple[int, int]


def merged(extents: Iterable[Extent]) -> tuple[Extent, ...]:
    """Return sorted, disjoint extents, with those that meet as one."""
    found: list[Extent] = []
    for start, end in extents:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return tuple(found)


def clipped(gaps: Iterable[Extent], within: Iterable[Extent], shortest: int) -> Iterator[Extent]:
    """Yield the parts of gaps that are in ``within``, in order.

    Args:
        gaps: sorted and disjoint.
        within: sorted and disjoint; extents that meet count as one.
        shortest: shorter parts are left out.
    """
    allowed = merged(within)
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
