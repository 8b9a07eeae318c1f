"""The place of a claim's tokens after an edit of its session. Pure.

The rule: a claim follows its tokens. If an edit removed some of them, the claim keeps the longest
contiguous part that is left; if it removed all, the claim is harmed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from leyline_engine.contract import CopySegment, common_prefix
from leyline_engine.records.sources import SourceTurn

from .place import ClaimPlace


def followed(
    place: ClaimPlace,
    turn: SourceTurn,
    sources: Sequence[SourceTurn],
    copies: Sequence[CopySegment],
) -> tuple[int, int] | None:
    """Return the span of ``turn`` that holds the rest of a claim.

    Args:
        place: the claim's tokens as they are held.
        turn: the edited turn.
        sources: turns that it took tokens from.
        copies: the spans that it took, by index of ``sources``, whether copied or computed again.

    Returns:
        A half-open span, empty if nothing is left; None if the edit doesn't concern the claim: the
        turn has its pages where they were, or took tokens from nothing that holds them.
    """
    now = turn.keys()
    if place.covered_by(now, len(now)):
        return None
    for index, source in enumerate(sources):
        theirs = source.keys()
        if common_prefix(place.keys, theirs) >= place.end:
            kept = common_prefix(theirs, now)
            mine = [copy for copy in copies if copy.source == index]
            pieces = _pieces(place.start, place.end, kept, mine)
            return max(_joined(sorted(pieces)), key=lambda piece: piece[1] - piece[0])
    return None


def _pieces(
    start: int, end: int, kept: int, copies: Sequence[CopySegment]
) -> Iterator[tuple[int, int]]:
    """Yield the parts of ``[start, end)`` at their new places; an empty one first."""
    yield 0, 0
    if start < kept:
        yield start, min(end, kept)
    for copy in copies:
        first, last = max(start, copy.start), min(end, copy.end)
        if first < last:
            yield copy.dest + first - copy.start, copy.dest + last - copy.start


def _joined(pieces: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the sorted pieces, with those that touch or overlap joined."""
    found: list[tuple[int, int]] = []
    for first, last in pieces:
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return found
