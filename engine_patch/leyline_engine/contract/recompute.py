"""The tokens after an edit that are computed again though their KV could be kept. Pure.

KV after a cut has read the cut text. Two places remember it best: the first tokens after the cut
(boundary), and tokens that repeat a part of it (quotes), which were copied from it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

Extent = tuple[int, int]
"""Positions ``[start, end)`` of a source."""

MAX_QUOTES = 8
"""Maximum number of quotes of a prompt that are computed again; each may cost a forward."""
_JOINED = 8
"""Quotes at most so many tokens apart are computed together, which costs one forward."""
_FEWEST = 32
_SHARE = 100
"""Quotes of ``max(32, length / 100)`` tokens are computed again, those nearest to the cut first."""


@dataclass(frozen=True, slots=True)
class Recompute:
    """The extent of what is computed again after an amortized edit."""

    boundary: int = 0
    """Number of tokens after each edit."""
    quotes: int = 0
    """Length of the shortest quote, in tokens; 0 for none."""


def recomputed(tokens: array[int], cuts: Sequence[Extent], how: Recompute) -> list[Extent]:
    """Return the kept tokens of a source that are computed again.

    Args:
        tokens: the source.
        cuts: spans that edits remove, sorted and disjoint; empty ones only insert.

    Returns:
        Spans outside the cuts, sorted and disjoint.
    """
    spans = [(end, min(end + how.boundary, len(tokens))) for _, end in cuts if how.boundary]
    if how.quotes:
        spans += find_quotes(tokens, cuts, how.quotes)
    return [part for span in joined(spans, 0) for part in uncovered(span, cuts)]


def find_quotes(tokens: array[int], cuts: Sequence[Extent], shortest: int) -> list[Extent]:
    """Return spans after a cut that repeat a run of it that is new there.

    A run is new if its first occurrence is in the cut: what came before it can't have been copied
    from it. Neighbours are joined; of more than :data:`MAX_QUOTES` the first count.

    Args:
        shortest: tokens of the shortest run, at least 1.
    """
    cuts_of = _first_cuts(tokens, cuts, shortest)
    marks: list[Extent] = []
    if cuts_of:
        after = cuts[0][1]
        for place, gram in enumerate(_grams(tokens[after:], shortest), start=after):
            cut = cuts_of.get(gram)
            if cut is not None and place >= cut[1]:
                marks.append((place, place + shortest))
    return _within_budget(joined(marks, _JOINED), max(_FEWEST, len(tokens) // _SHARE))


def _first_cuts(
    tokens: array[int], cuts: Sequence[Extent], length: int
) -> dict[tuple[int, ...], Extent]:
    """Return the cuts in which runs of that length occur first, by run."""
    found: dict[tuple[int, ...], Extent] = {}
    for start, end in cuts:
        for gram in _grams(tokens[start:end], length):
            found.setdefault(gram, (start, end))
    if found:
        for place, gram in enumerate(_grams(tokens[: cuts[-1][1]], length)):
            if gram in found and place < found[gram][0]:
                del found[gram]
    return found


def _grams(tokens: Sequence[int], length: int) -> Iterator[tuple[int, ...]]:
    return zip(*(tokens[shift:] for shift in range(length)), strict=False)


def joined(spans: Iterable[Extent], gap: int = 0) -> list[Extent]:
    """Return spans in order, with those that overlap or are at most ``gap`` tokens apart as one."""
    found: list[Extent] = []
    for start, end in sorted(spans):
        if found and start - found[-1][1] <= gap:
            found[-1] = found[-1][0], max(found[-1][1], end)
        elif end > start:
            found.append((start, end))
    return found


def _within_budget(spans: Sequence[Extent], budget: int) -> list[Extent]:
    """Return the first spans that fit; a longer one leaves room for shorter ones after it."""
    chosen: list[Extent] = []
    for start, end in spans:
        if end - start <= budget and len(chosen) < MAX_QUOTES:
            chosen.append((start, end))
            budget -= end - start
    return chosen


def uncovered(extent: Extent, spans: Iterable[Extent]) -> list[Extent]:
    """Return the parts of an extent that none of the spans covers.

    Args:
        spans: sorted and disjoint; empty ones cover nothing.
    """
    start, end = extent
    edges = [start]
    for low, high in spans:
        if max(low, start) < min(high, end):
            edges += [max(low, start), min(high, end)]
    edges.append(end)
    return [(low, high) for low, high in list(pairwise(edges))[::2] if low < high]
