"""Requests as they come to a vLLM scheduler: those with an envelope become turns."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

from leyline_engine.admit.edits import EditRefusedError
from leyline_engine.admit.hints import Hints
from leyline_engine.contract import Reason
from leyline_engine.server.claim_desk import NO_ADMIT
from leyline_engine.vllm.block_keys import RequestKeys
from leyline_engine.vllm.claim_desk import SchedulerClaims
from leyline_engine.vllm.turn import Turn
from leyline_engine.vllm.withholding import Withholder


class Arrivals:
    """Reads the envelopes of one scheduler's requests.

    Args:
        turns: takes the turns, by request.
        claims: may keep what a session computes out of the cache.
        read: reads a request's envelope.
        block: tokens per block.
    """

    def __init__(
        self,
        turns: dict[str, Turn],
        claims: SchedulerClaims,
        withholder: Withholder,
        read: Callable[[Any], Hints],
        block: int,
    ) -> None:
        self._turns = turns
        self._claims = claims
        self._withholder = withholder
        self._read = read
        self._block = block

    def receive(self, request: Any) -> None:
        """Read a new request's envelope, if it has one."""
        hints = self._read(request)
        if hints.message_id is None:
            if hints.nameless:
                self._withholder.stranger(request, 0, "")
            return
        refusal = None if hints.invalid is None else EditRefusedError(hints.invalid, hints.detail)
        turn = Turn(
            request,
            hints.message_id,
            RequestKeys(request, self._block),
            hints.payload,
            refusal,
            hints.skipped,
            prove=hints.prove,
            prompt=array("q", request.prompt_token_ids),
        )
        self._turns[request.request_id] = turn
        if hints.nameless:
            self._withholder.turn(turn, 0, "")
        elif not self._claims.admits(turn):
            self._withholder.turn(turn, 0, "")
            if turn.payload is not None and turn.payload.sources:
                turn.refusal = EditRefusedError(Reason.REFUSED_BY_CLAIM, NO_ADMIT)
