"""Where a claim's tokens are after an edit of its session. Pure.

The rule: a claim goes where its tokens went. If an edit took some of them out, the longest part
that is left in one piece is what is claimed from then on; if it took all, the claim is harmed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from leyline_engine.contract import CopySegment, common_prefix
from leyline_engine.sources import SourceTurn


def followed(
    keys: array[int],
    start: int,
    turn: SourceTurn,
    sources: Sequence[SourceTurn],
    copies: Sequence[CopySegment],
) -> tuple[int, int] | None:
    """The span of ``turn`` that holds what is left of a claim.

    Args:
        keys: radix keys of the claim's tokens and of all before them.
        start: where the claim's own tokens begin.
        turn: the edited turn.
        sources: turns that it drew on.
        copies: what it copied, by index of ``sources``.

    Returns:
        Half open, empty where nothing is left; None where the claim isn't concerned: the turn
        has its tokens where they were, or drew on nothing that holds them.
    """
    now = turn.keys()
    if common_prefix(keys, now) == len(keys):
        return None
    for index, source in enumerate(sources):
        theirs = source.keys()
        if common_prefix(keys, theirs) == len(keys):
            kept = common_prefix(theirs, now)
            mine = [copy for copy in copies if copy.source == index]
            pieces = _pieces(start, len(keys), kept, mine)
            return max(_joined(sorted(pieces)), key=lambda piece: piece[1] - piece[0])
    return None


def _pieces(
    start: int, end: int, kept: int, copies: Sequence[CopySegment]
) -> Iterator[tuple[int, int]]:
    """Parts of ``[start, end)`` where they are now; an empty one first."""
    yield 0, 0
    if start < kept:
        yield start, min(end, kept)
    for copy in copies:
        first, last = max(start, copy.start), min(end, copy.end)
        if first < last:
            yield copy.dest + first - copy.start, copy.dest + last - copy.start


def _joined(pieces: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted pieces, those that touch or overlap as one."""
    found: list[tuple[int, int]] = []
    for first, last in pieces:
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return found
