"""Records of what a request of the litmus suite does to vLLM's block pool, block by block.

Blocks are read where vLLM hands them out and takes them back, and the free ones are counted in its
own queue. What a request leaves is what a look-up of its keys finds. One request runs at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from leyline_engine.claims.events import Allocated, EventLedger, Evicted, Freed
from leyline_engine.claims.keeper import ArrivingRequest
from leyline_engine.contract import Capability, ClaimRefusal
from leyline_engine.records.sources import SourceRegistry, SourceTurn
from leyline_engine.vllm.blocks import BlockCache
from leyline_engine.vllm.claim_desk import Keys, SchedulerClaims, candidate
from leyline_engine.vllm.turn import Turn
from leyline_lab.claims.litmus import LIMITS
from leyline_lab.claims.watching import record_arrival, record_retained


@dataclass(slots=True)
class _Watched:
    request: Any
    candidate: ArrivingRequest
    admits: bool
    begun: bool = False
    """True if it has taken blocks, and its arrival is recorded."""


class WatchedClaims(SchedulerClaims):
    """Claims over a pool that records each of its changes as an event.

    Args:
        scheduler: vLLM's, whose pool it is.
        ledger: takes the events.
    """

    def __init__(
        self,
        cache: BlockCache,
        registry: SourceRegistry,
        keys: Keys,
        capability: Capability,
        *,
        scheduler: Any,
        ledger: EventLedger,
    ) -> None:
        # Around the shelf: claims hear of an eviction between the two events.
        cache.watch_gifts(lambda _: self._begin(), self._evicted)
        super().__init__(
            cache, registry, keys, capability, limits=LIMITS, ledger=ledger, watched=True
        )
        cache.watch_gifts(lambda _: None, self._allocated)
        self.private = False
        """True if the next request isn't admitted to the cache."""
        self.refusal: ClaimRefusal | None = None
        """The answer to the last request."""
        self._manager = scheduler.kv_cache_manager
        self._watched: _Watched | None = None
        self._free_blocks = scheduler._free_blocks
        scheduler._free_blocks = self._freeing

    def admits(self, turn: Turn) -> bool:
        """Return True if KV that a turn computes may be kept for reuse."""
        return not self.private and super().admits(turn)

    def refuse_request(
        self, request: Any, turn: Turn | None, found: Callable[[], Sequence[Any]]
    ) -> ClaimRefusal | None:
        """Return why a request that has come can't run; see :class:`.SchedulerClaims`."""
        admits = turn is None or self.admits(turn)
        self._watched = _Watched(request, candidate(request, turn), admits)
        self.refusal = super().refuse_request(request, turn, found)
        return self.refusal

    def became_source(self, turn: Turn, source: SourceTurn) -> None:
        """Record what a turn leaves, before claims follow its tokens."""
        self._tell_retained()
        super().became_source(turn, source)

    def _free(self) -> int:
        return self._cache.count_empty()

    def _begin(self) -> None:
        """Record the arrival of a request that takes its first blocks, and what it matched."""
        watched = self._watched
        if watched is None or watched.begun:
            return
        watched.begun = True
        # It has no others yet.
        matched = self._slots(lambda: self._blocks_of(watched.request))()
        record_arrival(self.keeper, watched.candidate, matched, admits=watched.admits)

    def _blocks_of(self, request: Any) -> list[Any]:
        return list(self._manager.get_blocks(request.request_id).blocks[0])

    def _evicted(self, blocks: Sequence[int]) -> None:
        """Record what blocks held until the pool handed them out."""
        if self._watched is None:
            return
        size, names = self._cache.block, self.keeper.names
        runs = names.known([block * size + slot for block in blocks for slot in range(size)])
        if runs:
            free = self._free() + len(blocks)  # they aren't the request's yet
            request = self._watched.candidate.name
            self.keeper.ledger.append(Evicted(request=request, runs=runs, free=free))
            names.forget(runs)

    def _allocated(self, blocks: Sequence[int]) -> None:
        """Record blocks that the pool has handed out."""
        if self._watched is not None and blocks:
            request = self._watched.candidate.name
            event = Allocated(request=request, pages=len(blocks), free=self._free())
            self.keeper.ledger.append(event)

    def _tell_retained(self) -> None:
        """Record the blocks of the request that others find from now on."""
        if self._watched is not None and self._watched.begun:
            self._record_found(self._watched)

    def _record_found(self, watched: _Watched) -> None:
        keys = watched.request.block_hashes
        slots = self._slots(lambda: self._cache.find(keys))()
        name, source = watched.candidate.name, watched.candidate.source
        record_retained(self.keeper, name, source, slots, self._free())

    def _freeing(self, request: Any) -> None:
        """Record a request's end, and the blocks that vLLM takes back and that hold nothing."""
        watched = self._watched
        if watched is None or watched.request is not request:
            self._free_blocks(request)
            return
        self._tell_retained()  # whoever may have wanted it
        before = self._free()
        self._free_blocks(request)
        self._watched = None
        if watched.begun:
            freed = self._free() - before
            name = watched.candidate.name
            self.keeper.ledger.append(Freed(request=name, pages=freed, free=before + freed))
