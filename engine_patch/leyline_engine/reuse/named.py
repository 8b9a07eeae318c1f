"""Content that the proxy names: places of a prompt's messages in turns of its tenant. Pure.

::

    prompt   0 ── prefix ──┤             gap             ├══ copy of an edit ══┤ n
    named                       ░ message ░ ░ message ░
    hits                     ░░░░░░░░░░░░░░ ░░░░░░░░░░░░░░░
                            extended left and right while ids agree

The names are hints: only tokens that agree with the prompt become a hit, so a wrong one costs a
comparison. Unlike the search by fingerprints, this finds messages below 64 tokens, and needs no
index.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from leyline_engine.contract import CopySegment, ReusePayload
from leyline_engine.records.sources import SessionKey, SourceRegistry, SourceTurn
from leyline_engine.reuse.agreement import agreement
from leyline_engine.reuse.matching import MIN_PIECE, Candidate, Hit


@dataclass(frozen=True, slots=True)
class Named:
    """Tokens of a source that the proxy expects to be the prompt's at ``copy.dest``."""

    source: SourceTurn
    copy: CopySegment


def named_places(
    registry: SourceRegistry, session: SessionKey, asked: ReusePayload, length: int
) -> tuple[Named, ...]:
    """Return the named places that the engine's own record has; others are left out.

    If only the session's own turns may be taken, those of other sessions are left out, too.

    Args:
        session: whose prompt it is; all sources are of its tenant scope.
        length: of the prompt.
    """
    scope, own = session
    sources: list[SourceTurn | None] = []
    for wanted in asked.sources:
        holder = wanted.session or own
        source = registry.get((scope, holder), wanted.turn)
        known = source is not None and registry.is_that(source, wanted)
        known = known and (holder == own or not asked.own)
        sources.append(source if known else None)
    found: list[Named] = []
    cursor = 0
    for copy in asked.copies:
        source = sources[copy.source] if 0 <= copy.source < len(sources) else None
        if source is None or not 0 <= copy.start < copy.end <= len(source.tokens):
            continue
        if cursor <= copy.dest and copy.dest_end <= length:
            found.append(Named(source, copy))
            cursor = copy.dest_end
    return tuple(found)


def named_hits(
    prompt: array[int],
    gaps: Sequence[tuple[int, int]],
    places: Sequence[Named],
    session: SessionKey,
    available: Callable[[SourceTurn], int],
    *,
    sink: int,
) -> tuple[Hit, ...]:
    """Return the parts of a prompt's gaps that named places serve, in order.

    A part that agrees is extended as far as its neighbours agree, too: over the marks of roles, and
    over messages that are too short to be named.

    Args:
        gaps: half-open spans of the prompt, in order, that nothing else serves.
        places: by destination; they don't overlap.
        available: returns how many leading tokens of a source are cached.
        sink: leading positions of a source that serve as attention sink; never copied elsewhere.
    """
    ours = np.frombuffer(prompt, dtype=np.int64)
    candidates: dict[int, Candidate] = {}
    starts = [begin for begin, _ in gaps]
    found: list[Hit] = []
    cursor = 0
    for place in places:
        key = id(place.source)
        if key not in candidates:
            candidates[key] = Candidate.of(place.source, prompt, available(place.source))
        for begin, stop in gaps[max(0, bisect_right(starts, place.copy.dest) - 1) :]:
            if begin >= place.copy.dest_end:
                break
            gap = (max(begin, cursor), stop)
            for start, end in _agreeing(ours, candidates[key].view, place.copy, gap, sink):
                shift = place.copy.start - place.copy.dest
                kind = candidates[key].kind(start + shift, end + shift, session)
                found.append(Hit(place.source, start + shift, end + shift, start, kind))
                cursor = end
    return tuple(found)


def left_over(gaps: Sequence[tuple[int, int]], hits: Sequence[Hit]) -> Iterator[tuple[int, int]]:
    """Yield the parts of gaps that no hit serves, if they are long enough for another.

    Args:
        hits: in order, each inside a gap.
    """
    at = 0
    for begin, stop in gaps:
        cursor = begin
        while at < len(hits) and hits[at].dest < stop:
            if hits[at].dest - cursor >= MIN_PIECE:
                yield cursor, hits[at].dest
            cursor = hits[at].dest_end
            at += 1
        if stop - cursor >= MIN_PIECE:
            yield cursor, stop


def _agreeing(
    ours: NDArray[np.int64],
    theirs: NDArray[np.int64],
    copy: CopySegment,
    gap: tuple[int, int],
    sink: int,
) -> Iterator[tuple[int, int]]:
    """Yield the prompt's spans around a copy, inside a gap, in which ids agree."""
    shift = copy.start - copy.dest
    low, high = max(gap[0], sink - shift), min(gap[1], len(theirs) - shift)
    begin, end = max(copy.dest, low), min(copy.dest_end, high)
    if begin >= end:
        return
    begin -= agreement(ours[low:begin][::-1], theirs[low + shift : begin + shift][::-1])
    end += agreement(ours[end:high], theirs[end + shift : high + shift])
    differ = np.flatnonzero(ours[begin:end] != theirs[begin + shift : end + shift]) + begin
    start = begin
    for stop in (*differ.tolist(), end):
        if stop - start >= MIN_PIECE:
            yield start, stop
        start = stop + 1
