"""Claims in one SGLang scheduler: commands as they reach every rank, and refusals of requests.

A request that can't fit beside the hard claims is refused before it is queued. Waiting requests are
checked again after each command, so that none waits for a claim.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS
from sglang.srt.mem_cache.allocator.page_interleave import page_interleave_shard_size

from leyline_engine.claims.events import EventLedger
from leyline_engine.claims.feasibility import Arithmetic
from leyline_engine.claims.keeper import ArrivingRequest, ClaimKeeper
from leyline_engine.claims.limits import Limits
from leyline_engine.contract import (
    ClaimProblem,
    ClaimRefusal,
    ClaimReply,
    ProblemCode,
    decode_command,
)
from leyline_engine.plan import PAGE_SIZES, page_floor
from leyline_engine.server.claim_clock import ClaimAnswer, ClaimMessage
from leyline_engine.sglang.shelf import RadixShelf, Tree
from leyline_engine.sglang.turn import Turn
from leyline_engine.sources import SourceRegistry, SourceTurn

LIMITS_VARIABLE = "LEYLINE_CLAIM_LIMITS"
"""Environment variable: ``{"share": 0.5, …}``, fields of :class:`~.claims.limits.Limits`."""

NO_ADMIT = "a claim keeps what this session computes out of the cache"


class ClaimDesk:
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
        self.obstacle = _obstacle(page_size, tree)
        self.shelf = RadixShelf(tree)
        self.keeper = ClaimKeeper(
            registry,
            self.shelf,
            page_floor(usable, page_size),
            # PrefillAdder adds a page to a prompt's tokens, which it doesn't round up.
            Arithmetic(page_size=page_size, clip_output=CLIP_MAX_NEW_TOKENS, strict=True),
            limits=limits,
            ledger=ledger,
            watched=watched,
        )
        self.shelf.gave_way = self.keeper.gave_way
        self.shelf.passed_over = self.keeper.passed_over
        self.recheck = False
        """True if a waiting request may have become one that can't run."""

    def carry_out(self, message: ClaimMessage) -> ClaimAnswer:
        """Advance the clock, and carry out the command."""
        self.keeper.tick(message.order, message.now_ms)
        reply = ClaimReply()
        if message.command:
            reply = self._reply(message.command)
            self.recheck = True
        return ClaimAnswer(message.order, reply, self.keeper.book.next_deadline_ms)

    def _reply(self, command: str) -> ClaimReply:
        if self.obstacle:
            return ClaimReply(problem=ClaimProblem(ProblemCode.UNSUPPORTED, self.obstacle))
        try:
            return self.keeper.carry_out(decode_command(command.encode()))
        except (msgspec.DecodeError, RecursionError) as error:
            return ClaimReply(problem=ClaimProblem(ProblemCode.INVALID_CLAIM, str(error)))

    def refuse(
        self, req: Any, turn: Turn | None, matched: Callable[[], Sequence[int]]
    ) -> ClaimRefusal | None:
        """Return why a request can't run before a claim ends.

        Args:
            turn: its state, if it brought an envelope.
            matched: slots of its cached prefix.
        """
        return self.keeper.refuse(_candidate(req, turn), matched)

    def blocks(self, req: Any, turn: Turn | None, matched: Callable[[], Sequence[int]]) -> bool:
        """Return True if :meth:`refuse` would refuse; nothing is recorded."""
        return self.keeper.blocks(_candidate(req, turn), matched)

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

    def retained(self, turn: Turn, source: SourceTurn | None) -> None:
        """Record that a turn became a source: its session's claims follow the tokens it spliced."""
        checked, plan = turn.checked, turn.plan
        if not self.keeper or source is None or checked is None or plan is None:
            return
        if checked.edit is not None and not checked.only_reuses:
            self.keeper.follow(source, checked.edit.sources, checked.edit.own_copies)
            # Moved claims may lock more than before, where they lay over another claim.
            self.recheck = True

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
    if page_interleave_shard_size(tree.token_to_kv_pool_allocator) > 1:
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


def explain(refusal: ClaimRefusal) -> str:
    """Return a refusal as a sentence, for the request's owner."""
    own = f", of which yours: {', '.join(refusal.own)}" if refusal.own else ""
    count = len(refusal.own) + refusal.others
    wait = (
        "one of them is released"
        if refusal.retry_after_ms is None
        else f"{-(-refusal.retry_after_ms // 1000)} s have passed"
    )
    return (
        f"refused_by_claim: the request needs {refusal.needed} tokens of KV, and {count} claims "
        f"leave {refusal.usable - refusal.protected} of {refusal.usable}{own}. "
        f"It can run when {wait}."
    )


def limits_from(environment: Mapping[str, str] = os.environ) -> Limits:
    """Return the limits that the operator set.

    Raises:
        ValueError: they can't be read; the text names the variable and the field.
    """
    text = environment.get(LIMITS_VARIABLE)
    if not text:
        return Limits()
    try:
        return msgspec.json.decode(text, type=Limits)
    except msgspec.DecodeError as error:
        raise ValueError(f"{LIMITS_VARIABLE}: {error}") from error
