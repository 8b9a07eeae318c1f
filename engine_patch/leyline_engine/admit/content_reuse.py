"""Reuse in one engine: what its retained turns hold, and what a request may take of it."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import msgspec

from leyline_engine.admit.edits import ResolvedEdit
from leyline_engine.admit.plan import Plan, plan_turn
from leyline_engine.admit.rules import CheckedRequest
from leyline_engine.contract import (
    ATTENTION_SINK,
    MAX_EXTENTS,
    CopySegment,
    ReuseCounts,
    ReuseKind,
    ReuseMode,
    ReusePayload,
)
from leyline_engine.records.ledger import SpanLedger
from leyline_engine.records.sources import SessionKey, SourceRegistry, SourceTurn
from leyline_engine.reuse.entering import Slots
from leyline_engine.reuse.extents import clipped
from leyline_engine.reuse.fingerprints import MatcherKind, fingerprinter
from leyline_engine.reuse.index import ReuseIndex
from leyline_engine.reuse.matching import MAX_HITS, MIN_PIECE, Hit, Hits, ReuseMatcher
from leyline_engine.reuse.named import left_over, named_hits, named_places
from leyline_engine.reuse.own import OwnTurns

MAX_TENANTS = 1024
"""Bound of the tenants that are indexed; those that asked least recently are dropped first."""

Available = Callable[[SourceTurn], int]
"""Returns how many leading tokens of a source are cached."""


class ContentReuse:
    """The index of one engine's retained turns, and the search in it.

    Only tenants that ask for reuse are indexed, from their first such request on.

    Args:
        registry: its turns leave the index when they are dropped.
        ledger: knows what other tenants may take of a turn.
        capacity: slots of the pool.
        salt: makes hashes that nobody can search for; the same on all ranks of a replica.
        max_copies: hits of one request that are copied at most; the longest are.
        matcher: the choice of fingerprints.
        defers: see :class:`~.reuse.index.ReuseIndex`.
        lay: the engine's :func:`~.plan.plan_turn`, with its pages and its costs.
    """

    def __init__(
        self,
        registry: SourceRegistry,
        ledger: SpanLedger,
        capacity: int,
        *,
        salt: bytes,
        max_copies: int = MAX_HITS,
        matcher: MatcherKind = MatcherKind.WINNOW,
        defers: bool = False,
        lay: Callable[..., Plan] = plan_turn,
    ) -> None:
        self._registry = registry
        self._ledger = ledger
        self._max_copies = max_copies
        self._lay = lay
        prints = fingerprinter(matcher, int.from_bytes(salt[:8], "big"))
        self.index = ReuseIndex(prints, capacity, defers=defers)
        self._matcher = ReuseMatcher(self.index, prints, sink=ATTENTION_SINK)
        self._scopes: OrderedDict[str, None] = OrderedDict()
        registry.dropped = self.index.drop

    def retained(self, source: SourceTurn, slots: Callable[[], Slots]) -> None:
        """Record that a turn was retained.

        Args:
            source: if the registry kept an earlier turn of its name, nothing is recorded.
            slots: returns the slots of its cached beginning, in order.
        """
        if source.scope not in self._scopes:
            return
        if self._registry.get((source.scope, source.session), source.turn) is source:
            self.index.add(source, slots())

    def computed(
        self,
        scope: str,
        prompt: Callable[[], SourceTurn],
        slots: Callable[[SourceTurn], Slots],
    ) -> SourceTurn | None:
        """Record that the prompt of a turn is cached, though the turn still runs.

        Args:
            scope: its tenant.
            prompt: returns the prompt as a source; called if the tenant is indexed.
            slots: returns the slots of a source's cached beginning, in order.

        Returns:
            The source, for :meth:`ended`; None if the tenant isn't indexed.
        """
        if scope not in self._scopes:
            return None
        source = prompt()
        self.index.add(source, slots(source))
        return source

    def ended(self, prompt: SourceTurn) -> None:
        """Record that a turn ended, or is withheld; :meth:`retained` comes first.

        Args:
            prompt: what :meth:`computed` returned of it.
        """
        self.index.drop(prompt, self._registry.turns((prompt.scope, prompt.session)))

    def search(self, request: CheckedRequest, prefix: int, available: Available) -> CheckedRequest:
        """Look for a request's content elsewhere, if it asks for that.

        A request that forgets, or whose edit was refused, takes nothing: it is to run as plainly
        as it can. One whose ``within`` is empty makes its tenant known to the index, and costs no
        search.

        Args:
            prefix: length of its cached prefix.

        Returns:
            The request with its hits; if they are to be copied, as copies of its edit.
        """
        asked, payload = request.reuse, request.payload
        if asked is None or payload is None or request.forgets or request.refusal is not None:
            return request
        self._note(payload.scope)
        if asked.within == ():
            return request
        groups = frozenset(asked.groups)

        def usable(source: SourceTurn) -> int:
            if source.scope == payload.scope:
                return available(source)
            return min(available(source), self._ledger.offered_length(source, groups))

        copies = request.edit.copies if request.edit is not None else ()
        gaps = tuple(_gaps(len(request.prompt), max(prefix, payload.sink), copies))
        if asked.within is not None:
            gaps = tuple(clipped(gaps, asked.within, MIN_PIECE))
        hits = self._found(request.prompt, gaps, asked, (payload.scope, payload.session), usable)
        hits = hits.longest(self._max_copies)
        if not hits.found:
            return replace(request, hits=hits)
        edit = _with_hits(request.edit or ResolvedEdit(payload, (), (), None), hits, asked.boundary)
        if asked.mode is ReuseMode.LIVE:
            return replace(request, hits=hits, edit=edit)
        return replace(request, hits=self._foreseen(edit, len(request.prompt), prefix, hits))

    def _foreseen(self, edit: ResolvedEdit, length: int, prefix: int, hits: Hits) -> Hits:
        """Return the parts of hits that would be copied: not what fills no page, or isn't worth it.

        Args:
            edit: the edit that would copy them.
            length: tokens of the prompt.
        """
        plan = self._lay(
            length,
            prefix,
            edit.copies,
            [len(source.tokens) for source in edit.sources],
            sink=max(edit.payload.sink, ATTENTION_SINK),
            kinds=edit.kinds,
        )
        parts = [(copy, edit.kinds[copy.source]) for copy in plan.copies]
        found = (
            Hit(edit.sources[copy.source], copy.start, copy.end, copy.dest, kind)
            for copy, kind in parts
            if kind is not None
        )
        return replace(hits, found=tuple(found))

    def _found(
        self,
        prompt: array[int],
        gaps: Sequence[tuple[int, int]],
        asked: ReusePayload,
        session: SessionKey,
        available: Available,
    ) -> Hits:
        """Cover gaps with what the proxy names, and search for the rest."""
        places = named_places(self._registry, session, asked, len(prompt))
        named = named_hits(prompt, gaps, places, session, available, sink=ATTENTION_SINK)
        left = left_over(gaps, named)
        own = OwnTurns(session, self._registry.turns(session)) if asked.own else None
        groups = frozenset[str]() if asked.own else frozenset(asked.groups)
        hits = self._matcher.find(prompt, left, session, available, groups, own=own)
        found = sorted((*named, *hits.found), key=lambda hit: hit.dest)
        return replace(hits, found=tuple(found))

    def _note(self, scope: str) -> None:
        """Note that a tenant asks for reuse."""
        self._scopes[scope] = None
        self._scopes.move_to_end(scope)
        if len(self._scopes) > MAX_TENANTS:
            gone, _ = self._scopes.popitem(last=False)
            self.index.drop_tenant(gone)


def reuse_counts(request: CheckedRequest, plan: Plan) -> ReuseCounts | None:
    """Return a request's account of reuse; None if nothing was looked for.

    Args:
        plan: as it was carried out.
    """
    asked, hits = request.reuse, request.hits
    if asked is None or hits is None:
        return None
    live = asked.mode is ReuseMode.LIVE
    count = plan.reused_of if live else hits.tokens_of
    extents = plan.reused_extents if live else ()
    by_kind = {kind.value: count(kind) for kind in ReuseKind}
    counts = ReuseCounts(
        mode=asked.mode,
        bounded=hits.bounded or len(extents) > MAX_EXTENTS,
        extents=extents[:MAX_EXTENTS],
    )
    return msgspec.structs.replace(counts, **by_kind)


def _gaps(length: int, start: int, copies: Iterable[CopySegment]) -> Iterable[tuple[int, int]]:
    """Yield the parts of a prompt after ``start`` that no copy of an edit serves."""
    cursor = max(start, ATTENTION_SINK)
    for copy in copies:
        if copy.dest - cursor >= MIN_PIECE:
            yield cursor, copy.dest
        cursor = max(cursor, copy.dest_end)
    if length - 1 - cursor >= MIN_PIECE:
        yield cursor, length - 1


def _with_hits(edit: ResolvedEdit, hits: Hits, boundary: int) -> ResolvedEdit:
    """Return an edit that copies hits, too, each without its first ``boundary`` tokens."""
    sources, kinds = list(edit.sources), list(edit.kinds or [None] * len(edit.sources))
    places: dict[tuple[int, ReuseKind], int] = {}
    copies = list(edit.copies)
    for hit in hits.found:
        if hit.length - boundary < MIN_PIECE:
            continue
        key = (id(hit.source), hit.kind)
        if key not in places:
            places[key] = len(sources)
            sources.append(hit.source)
            kinds.append(hit.kind)
        copies.append(CopySegment(places[key], hit.start + boundary, hit.end, hit.dest + boundary))
    copies.sort(key=lambda copy: copy.dest)
    return replace(edit, sources=tuple(sources), copies=tuple(copies), kinds=tuple(kinds))
