"""Claims in one vLLM scheduler: its arithmetic, and its requests and turns as claims see them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from leyline_engine.claims.events import EventLedger
from leyline_engine.claims.feasibility import Arithmetic
from leyline_engine.claims.keeper import ArrivingRequest, ClaimKeeper
from leyline_engine.claims.limits import Limits
from leyline_engine.contract import Capability, ClaimRefusal
from leyline_engine.records.sources import SourceRegistry, SourceTurn
from leyline_engine.scheduler.containment import contained
from leyline_engine.server.claim_desk import ClaimDesk
from leyline_engine.vllm.blocks import BlockCache
from leyline_engine.vllm.claim_shelf import BlockShelf
from leyline_engine.vllm.turn import Turn

Keys = Callable[[SourceTurn], Iterable[bytes]]
"""Returns the keys of a turn's blocks."""

CLIP_OUTPUT = 4096
"""Most tokens of an answer for which a request must find room before it begins. vLLM itself asks
for none, and a client that gives no limit means the whole context."""


class SchedulerClaims(ClaimDesk):
    """Claims of one scheduler.

    vLLM takes whole blocks for a prompt and its answer, whose last token has none, and keeps no
    reserve for a request that runs alone. A request that later finds no block is preempted, and
    waits with all that it has written; so it is checked again.

    Args:
        cache: the blocks.
        registry: retained turns, which claims name.
        keys: returns the keys of a turn's blocks.
        capability: an engine that doesn't splice takes no claims: its blocks aren't understood.
        ledger, watched: see :class:`.keeper.ClaimKeeper`.
    """

    def __init__(
        self,
        cache: BlockCache,
        registry: SourceRegistry,
        keys: Keys,
        capability: Capability,
        *,
        limits: Limits | None = None,
        ledger: EventLedger | None = None,
        watched: bool = False,
    ) -> None:
        self._cache = cache
        self.shelf = BlockShelf(cache, keys)
        arithmetic = Arithmetic(
            cache.block, clip_output=CLIP_OUTPUT, strict=False, whole_pages=True, reserve=0
        )
        super().__init__(
            ClaimKeeper(
                registry,
                self.shelf,
                cache.capacity,
                arithmetic,
                limits=limits,
                ledger=ledger,
                watched=watched,
            ),
            "" if capability.splices else f"no claims here: {capability.unsupported_reason}",
        )
        self.shelf.gave_way = self.keeper.gave_way
        self.shelf.passed_over = self.keeper.passed_over
        cache.hiding = self._hiding

    def _hiding(self, blocks: Sequence[Any], cause: str) -> None:
        """End the claims on blocks that are about to be removed from what is found."""
        if self.keeper:
            self.keeper.lose(self._slots(lambda: blocks)(), cause)

    def refuse_request(
        self, request: Any, turn: Turn | None, found: Callable[[], Sequence[Any]]
    ) -> ClaimRefusal | None:
        """Return why a request can't run, or continue, before a claim ends.

        Args:
            found: returns the cached blocks of its prompt's beginning.
        """
        return self.refuse(candidate(request, turn), self._slots(found))

    def bars(self, request: Any, turn: Turn, found: Callable[[], Sequence[Any]]) -> bool:
        """Return True if :meth:`refuse_request` would refuse; nothing is recorded."""
        return self.blocks(candidate(request, turn), self._slots(found))

    def _slots(self, found: Callable[[], Sequence[Any]]) -> Callable[[], Sequence[int]]:
        size = self._cache.block

        def slots() -> list[int]:
            firsts = [int(block.block_id) * size for block in found()]
            return [first + offset for first in firsts for offset in range(size)]

        return slots

    def admits(self, turn: Turn) -> bool:
        """Return True if KV that a turn computes may be kept for reuse."""
        return turn.session is None or self.keeper.admits(*turn.session)

    def admitted(self, turn: Turn) -> None:
        """Record that a turn runs: it hits the claims over its cached prefix."""
        if self.keeper and turn.session is not None:
            self.keeper.matched(turn.session, turn.path(turn.prompt).keys, turn.prefix)

    def became_source(self, turn: Turn, source: SourceTurn) -> None:
        """Record that a turn became a source; see :meth:`retained`."""
        with contained("moving claims"):
            if turn.checked is not None:
                self.retained(source, turn.checked)

    def flushing(self) -> None:
        """End all claims: vLLM empties its cache only if nobody holds a block."""
        with contained("ending claims"):
            self.keeper.lose_all("flushed")


def candidate(request: Any, turn: Turn | None) -> ArrivingRequest:
    """Return a waiting request as claims see it."""
    payload = turn.payload if turn is not None else None
    written = int(request.num_output_tokens)
    return ArrivingRequest(
        name=request.request_id,
        tenant=payload.scope if payload is not None else "",
        session=payload.session if payload is not None else "",
        source=payload.turn if payload is not None else request.request_id,
        prompt_tokens=int(request.num_prompt_tokens) + written,
        max_new_tokens=max(0, int(request.max_tokens) - written - 1),
    )


OpenClaims = Callable[[BlockCache, SourceRegistry, Keys, Capability], SchedulerClaims]
"""Opens the claims of a scheduler."""
