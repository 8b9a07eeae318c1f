"""Copies that a prompt could take from other sessions of its tenant, for the engine to check. Pure.

::

    prompt    ── own prefix ──┬── task ──┬══ copy of an edit ══┬── file ──┬── file ──┬─
    named                                                       ░░░░░░░░░░░░░░░░░░░░░
                                                                  one turn has both: one copy
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from leyline_engine.contract import (
    MAX_NAMED_COPIES,
    MAX_NAMED_SOURCES,
    CopySegment,
    Segment,
    SourceRef,
)

from ..model.rendered import MessageSpan, Rendered
from ..sessions.contents import ContentPlace, long_contents

Extent = tuple[int, int]
"""Half-open span of the prompt."""


@dataclass(frozen=True, slots=True)
class NamedCopies:
    """Retained turns, and the places in them that a prompt could take."""

    sources: tuple[SourceRef, ...] = ()
    """Sources with their sessions; digests aren't sealed."""
    copies: tuple[CopySegment, ...] = ()
    """Sorted by destination, disjoint, and equal to the prompt as far as is known here."""


@dataclass(slots=True)
class _Run:
    """Contents of one turn that lie in the prompt as they lie there."""

    source: SourceRef
    start: int
    end: int
    dest: int

    @property
    def length(self) -> int:
        return self.end - self.start

    def continues(self, place: ContentPlace, dest: int) -> bool:
        """Return True if a place is of the same turn, as far away from the run as in the prompt."""
        same = place.source == self.source
        return same and place.start >= self.end and place.start - self.start == dest - self.dest


def served_extents(prefix: int, segments: Sequence[Segment]) -> tuple[Extent, ...]:
    """Return the parts of a prompt that its session's own turns serve: in order, disjoint.

    Args:
        prefix: tokens that the session's last turn on this engine begins with, too.
        segments: of the turn's edit.
    """
    copies = [part for part in segments if isinstance(part, CopySegment) and part.dest_end > prefix]
    return ((0, prefix), *((max(part.dest, prefix), part.dest_end) for part in copies))


def name_copies(
    prompt: Rendered,
    served: Sequence[Extent],
    places_of: Callable[[MessageSpan], Sequence[ContentPlace]],
    *,
    session: str,
    sink: int,
) -> NamedCopies:
    """Return places of contents that nothing of the session's own serves.

    Neighbours that are neighbours in one turn, too, become one copy. If there are too many turns
    or copies, those with the most tokens are kept.

    Args:
        served: see :func:`served_extents`.
        places_of: returns the places of a message's content, the preferred first.
        session: whose prompt it is. Its own places are preferred to others'.
        sink: leading positions that the engine always computes.
    """
    begins = [begin for begin, _ in served]
    runs: list[_Run] = []
    last: _Run | None = None
    for span in long_contents(prompt.spans):
        at = bisect_right(begins, span.start) - 1
        wanted = span.end > sink and (at < 0 or served[at][1] < span.end)
        places = places_of(span) if wanted else ()
        place = _preferred(places, last, span.start, session) if places else None
        if place is None:
            last = None
        elif last is not None and last.continues(place, span.start):
            last.end = place.end
        else:
            last = _Run(place.source, place.start, place.end, span.start)
            runs.append(last)
    return _bounded(runs, session)


def _preferred(
    places: Sequence[ContentPlace], last: _Run | None, dest: int, session: str
) -> ContentPlace:
    """Return the place that continues the last run, else one of the session's own, else the first.

    A run is one copy, and its KV has read its own neighbours.
    """

    def rank(place: ContentPlace) -> tuple[bool, bool]:
        continues = last is not None and last.continues(place, dest)
        return not continues, place.source.session != session

    return min(places, key=rank)


def _bounded(runs: Sequence[_Run], session: str) -> NamedCopies:
    """Return runs as copies, within the bounds of a payload."""
    tokens: dict[SourceRef, int] = {}
    for run in runs:
        tokens[run.source] = tokens.get(run.source, 0) + run.length
    sources = sorted(tokens, key=lambda source: -tokens[source])[:MAX_NAMED_SOURCES]
    index = {source: number for number, source in enumerate(sources)}
    kept = sorted((run for run in runs if run.source in index), key=lambda run: -run.length)
    kept = sorted(kept[:MAX_NAMED_COPIES], key=lambda run: run.dest)
    return NamedCopies(
        tuple(_reference(source, session) for source in sources),
        tuple(CopySegment(index[run.source], run.start, run.end, run.dest) for run in kept),
    )


def _reference(source: SourceRef, session: str) -> SourceRef:
    """Return a reference as a payload of a session makes it: its own turns need no name."""
    own = source.session == session
    return SourceRef(source.turn, source.length, source.digest) if own else source
