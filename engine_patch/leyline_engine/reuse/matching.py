"""The search for content that is cached elsewhere: a prompt's gaps are covered by hits. Pure.

::

    prompt   0 ── prefix ──┤ gap ├══ copy of an edit ══┤        gap         ├ n
    hits                                                 ░░ hit ░░  ░ hit ░
                                                        extended left and right while ids agree

From left to right, each gap takes the best hit at the first position that has one, then continues
after it. Other tenants' places serve what the tenant's own leave. KV of a hit has read another
context than the prompt's, which its :class:`~leyline_engine.contract.ReuseKind` names.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from leyline_engine.contract import ReuseKind
from leyline_engine.records.keys import shared_length
from leyline_engine.records.sources import SessionKey, SourceTurn
from leyline_engine.reuse.agreement import agreement
from leyline_engine.reuse.fingerprints import Fingerprinter
from leyline_engine.reuse.index import Members, Place, ReuseIndex
from leyline_engine.reuse.own import OwnTurns
from leyline_engine.reuse.winnowing import GUARANTEE

MIN_HIT = GUARANTEE
"""Shortest common run that counts as content, in tokens."""
MAX_HITS = 1024
"""Maximum number of hits in one prompt."""
MAX_PROBES = 4096
"""Maximum number of the tenant's own places compared with one prompt."""
MAX_FOREIGN_PROBES = MAX_PROBES // 2
"""Maximum number of other tenants' places; apart, so that none of them uses up the tenant's own."""
MAX_SOURCES = 64
"""Maximum number of turns that one prompt is compared with."""
MAX_FOREIGN_SOURCES = MAX_SOURCES // 2
"""Maximum number of them that are other tenants'."""
MIN_PIECE = 16
"""Shortest part of a run that is copied where another hit, or a gap, leaves no more of it."""

_RANKS = {kind: rank for rank, kind in enumerate(ReuseKind)}


@dataclass(frozen=True, slots=True)
class Hit:
    """Tokens ``[start, end)`` of a source are the prompt's from ``dest`` on."""

    source: SourceTurn
    start: int
    end: int
    dest: int
    kind: ReuseKind

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def dest_end(self) -> int:
        return self.dest + self.length


@dataclass(frozen=True, slots=True)
class Hits:
    """The hits of one prompt, in order; they don't overlap."""

    found: tuple[Hit, ...] = ()
    bounded: bool = False
    """True if the search ended early, at one of its bounds."""

    @property
    def tokens(self) -> int:
        """Number of tokens that the hits cover."""
        return sum(hit.length for hit in self.found)

    def longest(self, count: int) -> Hits:
        """Return the ``count`` longest hits, in order."""
        if len(self.found) <= count:
            return self
        kept = sorted(self.found, key=lambda hit: -hit.length)[:count]
        return Hits(tuple(sorted(kept, key=lambda hit: hit.dest)), bounded=True)

    def tokens_of(self, kind: ReuseKind) -> int:
        """Return the number of tokens that the hits of a kind cover."""
        return sum(hit.length for hit in self.found if hit.kind is kind)


class ReuseMatcher:
    """Finds hits in one index.

    Args:
        fingerprinter: the one that the index was filled with.
        sink: leading positions of a source that serve as attention sink; never copied elsewhere.
        min_piece: see :data:`MIN_PIECE`.
    """

    def __init__(
        self,
        index: ReuseIndex,
        fingerprinter: Fingerprinter,
        *,
        sink: int,
        min_piece: int = MIN_PIECE,
    ) -> None:
        self._index = index
        self._fingerprinter = fingerprinter
        self._sink = sink
        self._min_piece = min_piece

    def find(
        self,
        prompt: array[int],
        gaps: Iterable[tuple[int, int]],
        session: SessionKey,
        available: Callable[[SourceTurn], int],
        groups: frozenset[str] = frozenset(),
        *,
        own: OwnTurns | None = None,
    ) -> Hits:
        """Cover the gaps of a prompt with hits.

        Args:
            gaps: half-open spans of the prompt, in order, that nothing else serves.
            session: whose prompt it is; hits are of the same tenant scope.
            available: returns how many leading tokens of a source may be taken.
            groups: hits are also of other tenants that retained turns in one of them.
            own: if given, hits are only of these turns of the session, and of those that it runs.
        """
        members = self._index.members(session[0], groups) if groups else Members()
        search = _Search(prompt, session, available, self._sink, self._min_piece)
        search.bounded = members.bounded
        for start, end in gaps:
            self._cover(search, start, end, members, own)
        found = sorted(search.found, key=lambda hit: hit.dest)
        return Hits(tuple(found), search.bounded or (own is not None and own.bounded))

    def _cover(
        self, search: _Search, start: int, end: int, others: Members, own: OwnTurns | None
    ) -> None:
        """Cover a gap: other tenants' places serve what the tenant's own leave."""
        margin = self._fingerprinter.guarantee - 1
        prints = self._fingerprinter.select(search.prompt, max(0, start - margin), end + margin)
        sample = _Sample(prints.positions.tolist(), prints.values.tolist(), margin)

        def mine(value: int) -> Iterable[Place]:
            places = self._index.places(search.session[0], value)
            return places if own is None else own.places(places)

        left = self._fill(search, sample, (start, end), mine)
        if others.tenants:
            for hole in sorted(left):
                self._fill(search, sample, hole, others.places)

    def _fill(
        self,
        search: _Search,
        sample: _Sample,
        gap: tuple[int, int],
        places: Callable[[int], Iterable[Place]],
    ) -> list[tuple[int, int]]:
        """Take the hits in a gap, and return the spans that are left."""
        positions, values, margin = sample.positions, sample.values, sample.margin
        start, end = gap

        def probe(at: int, begin: int, stop: int) -> Hit | None:
            return search.best(places(values[at]), positions[at], begin, stop)

        holes: list[tuple[int, int]] = []
        at, cursor = bisect_left(positions, start), start
        while at < len(positions) and positions[at] < end and not search.stopped:
            hit = probe(at, cursor, end)
            if hit is None:
                at += 1
                continue
            search.take(hit)
            holes.append((cursor, hit.dest))
            cursor = hit.dest_end
            at = bisect_left(positions, cursor)
        holes.append((cursor, end))
        left: list[tuple[int, int]] = []
        # A run that another one cut short, or that reaches beyond the gap, has its hash outside.
        while holes and not search.stopped:
            begin, stop = holes.pop()
            if stop - begin < self._min_piece:
                continue
            before = range(bisect_left(positions, begin - margin), bisect_left(positions, begin))
            inner = max(before.stop, bisect_left(positions, stop - margin))
            after = range(inner, bisect_left(positions, stop + margin))
            hit = next(filter(None, (probe(at, begin, stop) for at in (*before, *after))), None)
            if hit is None:
                left.append((begin, stop))
                continue
            search.take(hit)
            holes += [(begin, hit.dest), (hit.dest_end, stop)]
        return left


@dataclass(frozen=True, slots=True)
class _Sample:
    """The fingerprints of a gap and of the tokens around it, in order of their positions."""

    positions: list[int]
    values: list[int]
    margin: int
    """Tokens from a run's end within which one of its fingerprints lies."""


class _Search:
    """One prompt's search, within its bounds."""

    def __init__(
        self,
        prompt: array[int],
        session: SessionKey,
        available: Callable[[SourceTurn], int],
        sink: int,
        min_piece: int,
    ) -> None:
        self.prompt = prompt
        self.session = session
        self.found: list[Hit] = []
        self.stopped = False
        """True once a bound ended the search."""
        self.bounded = False
        """True if there may be more than was found."""
        self._view = np.frombuffer(prompt, dtype=np.int64)
        self._available = available
        self._sink = sink
        self._min_piece = min_piece
        self._probes = [0, 0]
        """Places compared: the tenant's own, and others'."""
        self._sources: dict[int, Candidate] = {}
        self._foreign = 0

    def take(self, hit: Hit) -> None:
        """Add a hit."""
        self.found.append(hit)
        if len(self.found) >= MAX_HITS:
            self.stopped = self.bounded = True

    def best(self, places: Iterable[Place], position: int, start: int, end: int) -> Hit | None:
        """Return the best hit through a prompt position, cut to ``[start, end)``."""
        if self.stopped:
            return None
        chosen: Hit | None = None
        for place in places:
            if not self._may_probe(place.source):
                break
            hit = self._extended(place, position, start, end)
            if hit is not None and (chosen is None or _order(hit) < _order(chosen)):
                chosen = hit
        return chosen

    def _may_probe(self, source: SourceTurn) -> bool:
        """Count a probe; returns False if there were too many."""
        foreign = source.scope != self.session[0]
        if self._probes[foreign] >= (MAX_FOREIGN_PROBES if foreign else MAX_PROBES):
            self.bounded = True
            self.stopped = self.stopped or not foreign
            return False
        self._probes[foreign] += 1
        return True

    def _extended(self, place: Place, position: int, start: int, end: int) -> Hit | None:
        """Return the run of equal ids through two positions, cut to ``[start, end)``."""
        candidate = self._candidate(place.source)
        if candidate is None:
            return None
        theirs, ours = candidate.view, self._view
        if place.position >= len(theirs):
            return None
        # Beyond the gap, only the run's length counts, and only up to the shortest.
        after = max(0, end - position) + MIN_HIT
        before = max(0, position - start) + MIN_HIT
        right = agreement(theirs[place.position :][:after], ours[position:])
        left = agreement(theirs[: place.position][::-1][:before], ours[:position][::-1])
        if left + right < MIN_HIT:
            return None
        shift = place.position - position
        dest = max(position - left, start, self._sink - shift)
        dest_end = min(position + right, end)
        if dest_end - dest < self._min_piece:
            return None
        kind = candidate.kind(dest + shift, dest_end + shift, self.session)
        return Hit(place.source, dest + shift, dest_end + shift, dest, kind)

    def _candidate(self, source: SourceTurn) -> Candidate | None:
        """Return what is known of a source; None if there are too many to look at one more."""
        known = self._sources.get(id(source))
        foreign = source.scope != self.session[0]
        if known is None and (
            len(self._sources) >= MAX_SOURCES or (foreign and self._foreign >= MAX_FOREIGN_SOURCES)
        ):
            self.bounded = True
        elif known is None:
            known = Candidate.of(source, self.prompt, self._available(source))
            self._sources[id(source)] = known
            self._foreign += foreign and len(known.view) > 0
        return known


@dataclass(frozen=True, slots=True)
class Candidate:
    """A source as one prompt sees it."""

    source: SourceTurn
    view: NDArray[np.int64]
    """Its tokens that may be taken."""
    shared: int
    """Number of leading tokens that the prompt has as well."""

    @classmethod
    def of(cls, source: SourceTurn, prompt: array[int], available: int) -> Candidate:
        """Return a source of which ``available`` leading tokens are cached, as a prompt sees it."""
        view = np.frombuffer(source.tokens, dtype=np.int64)[:available]
        return cls(source, view, shared_length(source.tokens, prompt))

    def kind(self, start: int, end: int, session: SessionKey) -> ReuseKind:
        """Return the kind of a hit on ``[start, end)``, in a prompt of ``session``."""
        if self.source.scope != session[0]:
            return ReuseKind.GROUP
        if start <= self.shared and end <= self.source.exact_length:
            return ReuseKind.CLEAN
        own = self.source.session == session[1]
        return ReuseKind.SESSION if own else ReuseKind.TENANT


def _order(hit: Hit) -> tuple[int, int]:
    """Return the sort key of hits, the best first."""
    return _RANKS[hit.kind], -hit.length
