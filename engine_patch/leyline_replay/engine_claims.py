"""Claims in the replay engine: the keeper over its cache, and the requests that claims refuse."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

from leyline_engine.claims.events import EventLedger
from leyline_engine.claims.feasibility import Arithmetic
from leyline_engine.claims.keeper import ArrivingRequest, ClaimKeeper
from leyline_engine.claims.limits import Limits
from leyline_engine.contract import (
    ClaimRefusal,
    CopySegment,
    ForgetCounts,
    Outcome,
    Reason,
    Receipt,
)
from leyline_engine.records.sources import SessionKey, SourceTurn
from leyline_replay.cache.listener import CacheListener
from leyline_replay.cache.manager import CacheManager
from leyline_replay.cache.radix import Node
from leyline_replay.cache.shelf import TreeShelf
from leyline_replay.cache.slots import Slots
from leyline_replay.requests import GenerationRequest


class RefusedByClaimError(Exception):
    """A request can't run, or not continue, before a claim ends.

    Attributes:
        refusal: the claims in the way, as the request's owner may know them.
        began: True if it ran already.
        forgot: counts of what was forgotten for it all the same.
    """

    def __init__(
        self, refusal: ClaimRefusal, *, began: bool = False, forgot: ForgetCounts | None = None
    ) -> None:
        super().__init__(_explained(refusal, began=began))
        self.refusal = refusal
        self.began = began
        self.forgot = forgot

    @property
    def detail(self) -> str:
        """The cause, for the receipt."""
        if self.began:
            return "decoding outgrew what claims leave"
        return "claims leave too little room"


def _explained(refusal: ClaimRefusal, *, began: bool) -> str:
    who = [f"yours ({', '.join(refusal.own)})"] if refusal.own else []
    who += [f"{refusal.others} of other tenants"] if refusal.others else []
    wait = "one of them is released"
    if refusal.retry_after_ms is not None:
        seconds = -(-refusal.retry_after_ms // 1000)
        wait = f"{seconds} s have passed" if seconds else "other requests have ended"
    return (
        f"{'decoding outgrew its room: ' if began else ''}"
        f"the request needs {refusal.needed} tokens of KV beside {refusal.protected} of "
        f"{refusal.usable} that claims hold: {' and '.join(who)}. It can run when {wait}."
    )


def as_refused(receipt: Receipt, error: RefusedByClaimError) -> Receipt:
    """Return the receipt of a request that could not run or continue; its turn is no source."""
    return Receipt(
        message_id=receipt.message_id,
        session=receipt.session,
        outcome=Outcome.REPREFILLED,
        reason=Reason.REFUSED_BY_CLAIM,
        detail=error.detail,
        tokens=receipt.tokens,
        forgot=receipt.forgot or error.forgot,
        skipped_actions=receipt.skipped_actions,
        refused=error.refusal,
    )


class EngineClaims(CacheListener):
    """The claims over one cache. The engine's thread drives it, like all of the engine.

    Args:
        clip_output: maximum number of output tokens in the engine's arithmetic.
        limits: limits of what may be claimed.
        ledger: ledger of events.
        watched: see :class:`~leyline_engine.claims.keeper.ClaimKeeper`.
    """

    def __init__(
        self,
        cache: CacheManager,
        clip_output: int,
        *,
        limits: Limits | None = None,
        ledger: EventLedger | None = None,
        watched: bool = False,
    ) -> None:
        self.shelf = TreeShelf(cache)
        self.keeper = ClaimKeeper(
            cache.registry,
            self.shelf,
            cache.capacity,
            # Slots are taken one by one, whatever the tree's pages.
            Arithmetic(cache.page_tokens, clip_output=clip_output, strict=False, reserve=1),
            limits=limits,
            ledger=ledger,
            watched=watched,
        )
        cache.listener = self

    # Calls from requests.

    def outgrown(self, request: ArrivingRequest, held: Slots) -> ClaimRefusal | None:
        """Return why a running request found no slot; None if no claim holds any.

        Args:
            request: the request, with its output as part of its prompt.
            held: its slots that are in the tree.
        """
        if not self.keeper.book.protected_pages:
            return None
        return self.keeper.refuse(request, held.tolist) or self.keeper.crowded(request)

    def arrived(self, request: ArrivingRequest, *, admits: bool) -> None:
        """Record that a request is about to be admitted.

        Args:
            admits: True if KV that it computes may be kept for reuse.
        """

    def matched_by(self, session: SessionKey, keys: Callable[[], array[int]], length: int) -> None:
        """Record that a session's request runs, and found ``length`` of its keys cached."""
        if self.keeper:
            self.keeper.matched(session, keys(), length)

    def follow(
        self, turn: SourceTurn, sources: Sequence[SourceTurn], copies: Sequence[CopySegment]
    ) -> None:
        """Move claims after a spliced turn was retained; see :meth:`ClaimKeeper.follow`."""
        if self.keeper:
            self.keeper.follow(turn, sources, copies)

    # Calls from the cache.

    def evicted(self, request: str, gone: Sequence[Node]) -> None:
        """Check ranked claims, which may have lost something or been spared."""
        self.keeper.gave_way(self.shelf.reached(gone), request)
        self.keeper.passed_over(self.shelf.passed_over(gone))

    def losing(self, slots: Slots, cause: str) -> None:
        """Have the claims over these slots let go of them."""
        if self.keeper or self.keeper.watched:
            self.keeper.lose(slots.tolist(), cause)

    def flushing(self) -> None:
        """Keep nothing for a claim's sake."""
        self.shelf.clear()

    def flushed(self) -> None:
        """Harm the claims that held anything."""
        self.keeper.lose_all("flushed")


class OpenClaims(Protocol):
    """Opens the claims of an engine; options are bound already."""

    def __call__(self, cache: CacheManager, clip_output: int, /) -> EngineClaims: ...


def candidate_of(request: GenerationRequest) -> ArrivingRequest:
    """Return a request as claims see it."""
    payload = request.payload
    return ArrivingRequest(
        name=request.request_id,
        tenant=payload.scope if payload else "",
        session=payload.session if payload else "",
        source=payload.turn if payload else "",
        prompt_tokens=len(request.tokens),
        max_new_tokens=request.max_new_tokens,
    )
