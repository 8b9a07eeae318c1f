"""Records of what requests do to the pool, page by page, so that a reader can judge the engine.

Attached for the litmus suite only: it names every cached page; otherwise only claimed ones have
names. Requests come one at a time and don't fail on the way. The engine takes slots one by one; to
a reader, a request has a page as soon as it has a slot of it. So the pool is of whole pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leyline_engine.claims.events import (
    Allocated,
    EventLedger,
    Evicted,
    Freed,
    Retained,
    Run,
)
from leyline_engine.claims.keeper import ArrivingRequest
from leyline_engine.claims.limits import Limits
from leyline_engine.claims.runs import count, without
from leyline_lab.claims.watching import record_arrival
from leyline_replay.cache.manager import CacheManager
from leyline_replay.cache.radix import EMPTY_SLOTS, Node, slots_of
from leyline_replay.cache.slots import Slots
from leyline_replay.engine_claims import EngineClaims


@dataclass(slots=True)
class _Watched:
    candidate: ArrivingRequest
    admits: bool
    matched: Slots
    told: bool = False
    """True if its arrival is recorded; an admission that finds no room leaves no trace."""
    owned: int = 0
    """Its slots that the tree doesn't have; the first begins a page."""
    pathless: bool = True
    """True until its path is recorded."""
    path: tuple[Run, ...] = ()
    """Its path, which added no page."""


class WatchedClaims(EngineClaims):
    """Claims over a cache that records each of its changes as an event."""

    def __init__(
        self, cache: CacheManager, clip_output: int, *, limits: Limits, ledger: EventLedger
    ) -> None:
        super().__init__(cache, clip_output, limits=limits, ledger=ledger, watched=True)
        self._cache = cache
        self._page = cache.page_tokens
        self._requests: dict[str, _Watched] = {}

    def arrived(self, request: ArrivingRequest, *, admits: bool) -> None:
        """Note an arrival, to record when it takes something; see :meth:`EngineClaims.arrived`."""
        self._requests[request.name] = _Watched(request, admits, EMPTY_SLOTS)

    def matched(self, request: str, slots: Slots) -> None:
        """Record a match, and the arrival before it; see :meth:`CacheListener.matched`."""
        self._requests[request].matched = slots

    def _begin(self, name: str) -> None:
        watched = self._requests[name]
        if watched.told:
            return
        watched.told = True
        record_arrival(
            self.keeper, watched.candidate, watched.matched.tolist(), admits=watched.admits
        )

    def _pages(self, slots: int) -> int:
        """Return the pages that a request's slots fill or begin."""
        return -(-slots // self._page)

    def _free(self) -> int:
        """Return the pages that nobody has, a part of a page of a request being a page."""
        owned = sum(self._pages(watched.owned) for watched in self._requests.values())
        return self.keeper.book.usable - self._cache.tree.cached_count() // self._page - owned

    def _own(self, request: str, slots: int) -> int:
        """Count slots that a request took, or gave away; returns its change in pages."""
        watched = self._requests[request]
        before = self._pages(watched.owned)
        watched.owned += slots
        return self._pages(watched.owned) - before

    def evicted(self, request: str, gone: Sequence[Node]) -> None:
        """Record an eviction, then pass it to the claims."""
        self._begin(request)
        keeper = self.keeper
        runs = keeper.names.known(slots_of(gone).tolist())
        keeper.ledger.append(Evicted(request=request, runs=runs, free=self._free()))
        keeper.names.forget(runs)
        super().evicted(request, gone)

    def allocated(self, request: str, count: int) -> None:
        """Record an allocation."""
        self._begin(request)
        if pages := self._own(request, count):
            event = Allocated(request=request, pages=pages, free=self._free())
            self.keeper.ledger.append(event)

    def published(self, request: str, path: Slots, spare: int) -> None:
        """Name new pages, and record the publication."""
        keeper, source = self.keeper, self._requests[request].candidate.source
        before = keeper.names.known(path.tolist())
        named = keeper.names.name(source, path.tolist())
        runs = without(named, before)
        self._own(request, -count(runs) * self._page)
        watched = self._requests[request]
        watched.path = () if runs or not watched.pathless else named
        if runs:
            watched.pathless = False
            retained = Retained(request=request, runs=runs, path=named, free=self._free())
            keeper.ledger.append(retained)
        if spare:
            pages = -self._own(request, -spare)
            freed = Freed(request=request, pages=pages, free=self._free(), ended=False)
            keeper.ledger.append(freed)

    def undone(self, request: str, count: int) -> None:
        """Record the slots that an undone prefill gave back."""
        pages = -self._own(request, -count)
        event = Freed(request=request, pages=pages, free=self._free(), ended=False)
        self.keeper.ledger.append(event)

    def ended(self, request: str, count: int) -> None:
        """Record a request's end."""
        if path := self._requests[request].path:
            # Of pages that were there, all of them: its source has a path all the same.
            retained = Retained(request=request, runs=(), path=path, free=self._free())
            self.keeper.ledger.append(retained)
        pages = self._pages(count)
        del self._requests[request]
        self.keeper.ledger.append(Freed(request=request, pages=pages, free=self._free()))
