"""Requests of a vLLM scheduler that claims leave no room for.

Such a request would wait for ever, or be preempted again and again. It ends with an error, which
the HTTP process turns into a 503 that names the claims in the way; see :mod:`.server.ending`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from leyline_engine.admit.edits import forgets
from leyline_engine.contract import ClaimRefusal
from leyline_engine.metrics import EngineMetrics
from leyline_engine.scheduler.containment import contained
from leyline_engine.server.claim_desk import explain
from leyline_engine.vllm.accounts import Accounts
from leyline_engine.vllm.admission import Admission
from leyline_engine.vllm.blocks import BlockCache
from leyline_engine.vllm.claim_desk import SchedulerClaims
from leyline_engine.vllm.turn import Phase, Turn
from leyline_engine.vllm.turn_forgets import TurnForgets


class Refuser:
    """Decides which requests of one scheduler end because of claims.

    Args:
        cache: the blocks.
        claims: what they hold.
        admission: looks prompts up.
        forget: carries out the forgets of turns.
        accounts: takes the reason into receipts.
        turns: turns that wait or run, by request.
    """

    def __init__(
        self,
        cache: BlockCache,
        claims: SchedulerClaims,
        admission: Admission,
        forget: TurnForgets,
        *,
        accounts: Accounts,
        metrics: EngineMetrics,
        turns: Mapping[str, Turn],
    ) -> None:
        self._cache = cache
        self._claims = claims
        self._admission = admission
        self._forgets = forget
        self._accounts = accounts
        self._metrics = metrics
        self._turns = turns

    def waiting(self, requests: Iterable[Any]) -> list[tuple[Any, str]]:
        """Return the waiting requests that can't run any more, with the reason; none if nothing has
        changed since the last look."""
        if not self._claims.recheck:
            return []
        self._claims.recheck = False
        found = [(each, self.refused(each)) for each in requests]
        return [(request, reason) for request, reason in found if reason]

    def refused(self, request: Any) -> str:
        """Return why a waiting request can't run before a claim ends; empty if it can."""
        refusal = None
        with contained("asking whether claims leave room"):
            refusal = self._refusal(request, self._turns.get(request.request_id))
        return "" if refusal is None else explain(refusal)

    def _refusal(self, request: Any, turn: Turn | None) -> ClaimRefusal | None:
        def found() -> list[Any]:
            return self._found(request, turn)

        if turn is not None and forgets(turn.payload) and self._claims.bars(request, turn, found):
            # The request may forget what is in its way, and no claim keeps that.
            self._admission.look_up(turn)
            self._forgets.carry_out(turn)
        refusal = self._claims.refuse_request(request, turn, found)
        if refusal is not None:
            self._metrics.refused()
            if turn is not None:
                began = request.num_output_tokens > 0
                self._accounts.refused(turn, len(turn.prompt), refusal, began=began)
        return refusal

    def _found(self, request: Any, turn: Turn | None) -> list[Any]:
        """Return the cached blocks of a waiting request's beginning."""
        within = (int(request.num_tokens) - 1) // self._cache.block
        if turn is not None and turn.phase is Phase.NEW and not turn.withheld:
            within = self._admission.look_up(turn)
        return self._cache.find(request.block_hashes, within)
