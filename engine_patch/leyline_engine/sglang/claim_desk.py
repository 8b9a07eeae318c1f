"""Claims in one SGLang scheduler: its arithmetic, and its requests and turns as claims see them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS
from sglang.srt.mem_cache.allocator.page_interleave import page_interleave_shard_size

from leyline_engine.admit.plan import PAGE_SIZES, page_floor
from leyline_engine.claims.events import EventLedger
from leyline_engine.claims.feasibility import Arithmetic
from leyline_engine.claims.keeper import ArrivingRequest, ClaimKeeper
from leyline_engine.claims.limits import Limits
from leyline_engine.contract import ClaimRefusal
from leyline_engine.records.sources import SourceRegistry, SourceTurn
from leyline_engine.server.claim_desk import ClaimDesk
from leyline_engine.sglang.shelf import RadixShelf, Tree
from leyline_engine.sglang.turn import Turn


class SchedulerClaims(ClaimDesk):
    """Claims of one scheduler.

    Args:
        tree: SGLang's tree.
        registry: retained turns, which claims name.
        usable: slots of the pool.
        page_size: SGLang's.
    """

    def __init__(
        self,
        tree: Tree,
        registry: SourceRegistry,
        *,
        usable: int,
        page_size: int = 1,
        limits: Limits | None = None,
        ledger: EventLedger | None = None,
        watched: bool = False,
    ) -> None:
        self.shelf = RadixShelf(tree)
        keeper = ClaimKeeper(
            registry,
            self.shelf,
            page_floor(usable, page_size),
            # PrefillAdder adds a page to a prompt's tokens, which it doesn't round up.
            Arithmetic(page_size=page_size, clip_output=CLIP_MAX_NEW_TOKENS, strict=True),
            limits=limits,
            ledger=ledger,
            watched=watched,
        )
        super().__init__(keeper, _obstacle(page_size, tree))
        self.shelf.gave_way = keeper.gave_way
        self.shelf.passed_over = keeper.passed_over

    def refuse_request(
        self, req: Any, turn: Turn | None, matched: Callable[[], Sequence[int]]
    ) -> ClaimRefusal | None:
        """Return why a request can't run before a claim ends.

        Args:
            turn: its state, if it brought an envelope.
            matched: slots of its cached prefix.
        """
        return self.refuse(_candidate(req, turn), matched)

    def bars(self, req: Any, turn: Turn | None, matched: Callable[[], Sequence[int]]) -> bool:
        """Return True if :meth:`refuse_request` would refuse; nothing is recorded."""
        return self.blocks(_candidate(req, turn), matched)

    def crowded(self, req: Any, turn: Turn | None) -> ClaimRefusal:
        """Return a refusal; see :meth:`ClaimKeeper.crowded`."""
        return self.keeper.crowded(_candidate(req, turn))

    def admits(self, turn: Turn) -> bool:
        """Return True if KV that a turn computes may be kept for reuse."""
        return turn.session is None or self.keeper.admits(*turn.session)

    def admitted(self, turn: Turn) -> None:
        """Record that a turn runs: it hits the claims over its cached prefix."""
        if self.keeper and turn.session is not None:
            req = turn.req
            keys = turn.keys(req.origin_input_ids)
            self.keeper.matched(turn.session, keys, req.prefix_len)

    def became_source(self, turn: Turn, source: SourceTurn | None) -> None:
        """Record that a turn became a source; see :meth:`retained`."""
        if source is not None and turn.checked is not None and turn.plan is not None:
            self.retained(source, turn.checked)

    def removing(self, keys: array[int], start: int, cause: str) -> None:
        """Record that the cached part of a path after ``start`` is about to be removed.

        Args:
            start: a page's edge.
        """
        if self.keeper or self.keeper.watched:
            self.keeper.lose(self.shelf.all_slots(keys)[start:], cause)


def _obstacle(page_size: int, tree: Tree) -> str:
    """Return why a server takes no claims, and the fix; empty if it does."""
    if page_size not in PAGE_SIZES:
        sizes = ", ".join(map(str, sorted(PAGE_SIZES)))
        return (
            f"claims aren't tested with pages of {page_size} tokens: use a --page-size of {sizes}"
        )
    if page_interleave_shard_size(tree.row_allocator) > 1:
        return "claims aren't tested with a sharded KV cache: drop --enable-kv-cache-sharding"
    if tree.speculative:
        return f"claims need SGLang without --speculative-algorithm {tree.speculative}"
    if tree.cache_controller is not None:
        return "claims need SGLang without --enable-hierarchical-cache"
    return ""


def _candidate(req: Any, turn: Turn | None) -> ArrivingRequest:
    payload = turn.payload if turn is not None else None
    written = len(req.output_ids)
    return ArrivingRequest(
        name=req.rid,
        tenant=payload.scope if payload is not None else "",
        session=payload.session if payload is not None else "",
        source=payload.turn if payload is not None else req.rid,
        prompt_tokens=len(req.origin_input_ids) + written,
        max_new_tokens=max(0, req.sampling_params.max_new_tokens - written),
    )
