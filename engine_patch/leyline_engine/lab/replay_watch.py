"""Records of what requests do to the pool, slot by slot, so that a reader can judge the engine.

Attached for the litmus suite only: it names every cached slot; otherwise only claimed ones have
names. Requests come one at a time and don't fail on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leyline_engine.claims.events import (
    Allocated,
    Arrived,
    EventLedger,
    Evicted,
    Freed,
    Matched,
    Retained,
)
from leyline_engine.claims.keeper import ArrivingRequest
from leyline_engine.claims.limits import Limits
from leyline_engine.replay.cache.manager import CacheManager
from leyline_engine.replay.cache.radix import EMPTY_SLOTS, Node, slots_of
from leyline_engine.replay.cache.slots import Slots
from leyline_engine.replay.engine_claims import EngineClaims


@dataclass(slots=True)
class _Watched:
    candidate: ArrivingRequest
    admits: bool
    matched: Slots
    told: bool = False
    """True if its arrival is recorded; an admission that finds no room leaves no trace."""


class WatchedClaims(EngineClaims):
    """Claims over a cache that records each of its changes as an event."""

    def __init__(
        self, cache: CacheManager, clip_output: int, *, limits: Limits, ledger: EventLedger
    ) -> None:
        super().__init__(cache, clip_output, limits=limits, ledger=ledger, watched=True)
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
        request, keeper = watched.candidate, self.keeper
        keeper.ledger.append(
            Arrived(
                request=name,
                tenant=request.tenant,
                session=request.session,
                source=request.source,
                prompt=request.prompt_tokens,
                pages=keeper.book.arithmetic.needed(request.prompt_tokens, request.max_new_tokens),
                write_no_admit=not watched.admits,
            )
        )
        runs = keeper.names.known(watched.matched.tolist())
        if runs:
            keeper.ledger.append(Matched(request=name, runs=runs))

    def evicted(self, request: str, gone: Sequence[Node]) -> None:
        """Record an eviction, then pass it to the claims."""
        self._begin(request)
        keeper = self.keeper
        runs = keeper.names.known(slots_of(gone).tolist())
        keeper.ledger.append(Evicted(request=request, runs=runs, free=self.shelf.free()))
        keeper.names.forget(runs)
        super().evicted(request, gone)

    def allocated(self, request: str, count: int) -> None:
        """Record an allocation."""
        self._begin(request)
        event = Allocated(request=request, pages=count, free=self.shelf.free())
        self.keeper.ledger.append(event)

    def published(self, request: str, path: Slots, spare: int) -> None:
        """Name new slots, and record the publication."""
        keeper, source = self.keeper, self._requests[request].candidate.source
        fresh = [slot for slot in path.tolist() if not keeper.names.known([slot])]
        named = keeper.names.name(source, path.tolist())
        free = self.shelf.free()
        runs = keeper.names.known(fresh)
        keeper.ledger.append(Retained(request=request, runs=runs, path=named, free=free - spare))
        if spare:
            keeper.ledger.append(Freed(request=request, pages=spare, free=free, ended=False))

    def undone(self, request: str, count: int) -> None:
        """Record the slots that an undone prefill gave back."""
        event = Freed(request=request, pages=count, free=self.shelf.free(), ended=False)
        self.keeper.ledger.append(event)

    def ended(self, request: str, count: int) -> None:
        """Record a request's end."""
        del self._requests[request]
        self.keeper.ledger.append(Freed(request=request, pages=count, free=self.shelf.free()))
