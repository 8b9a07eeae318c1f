"""A scheduler's account of its turns: receipts, counters, and the turns it retains as sources."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Mapping

import msgspec

from leyline_engine.containment import contained
from leyline_engine.contract import (
    Capability,
    ClaimRefusal,
    ForgetCounts,
    Outcome,
    Proof,
    Reason,
    Receipt,
    TokenCounts,
    TurnRecord,
)
from leyline_engine.ledger import SpanLedger
from leyline_engine.metrics import EngineMetrics
from leyline_engine.receipts import receipt_of
from leyline_engine.retention import retain_turn
from leyline_engine.server.channel import Sender
from leyline_engine.sglang.splicer import as_admitted
from leyline_engine.sglang.turn import Turn
from leyline_engine.sources import SessionKey, SourceRegistry, SourceTurn

log = logging.getLogger(__name__)


class Accounts:
    """Receipts of one scheduler.

    Args:
        registry: takes turns that ended.
        ledger: learns the names of the spans they wrote.
        sender: takes receipts to the HTTP process.
        metrics: this scheduler's counters.
    """

    def __init__(
        self, registry: SourceRegistry, ledger: SpanLedger, sender: Sender, metrics: EngineMetrics
    ) -> None:
        self._registry = registry
        self._ledger = ledger
        self._sender = sender
        self._metrics = metrics

    def announce(self, capability: Capability) -> None:
        """Announce the scheduler's capability."""
        self._sender.announce(capability)

    def admitted(self, turn: Turn) -> None:
        """Report that a turn's request runs: its reuse, and the outcome of its edits."""
        checked, plan = turn.checked, turn.plan
        assert checked is not None and plan is not None  # noqa: S101 - set before READY
        executed, counts = as_admitted(plan, turn.req.prefix_len, turn.loaded)
        turn.receipt = receipt_of(turn, checked, executed, counts)
        # SGLang takes all in front of the first chunk for cached, what stage rows computed, too.
        turn.req.already_computed = max(0, turn.req.prefix_len - counts.served)
        self._sender.send(TurnRecord(receipt=turn.receipt), turn.scope)

    def refused(self, turn: Turn, refusal: ClaimRefusal, *, began: bool) -> None:
        """Report that a turn's request can't run, or can't continue, because of claims.

        Args:
            began: True if it ran already.
        """
        detail = "decoding outgrew what claims leave" if began else "claims leave too little room"
        counts = TokenCounts(prompt=len(turn.req.origin_input_ids))
        session = turn.payload.session if turn.payload is not None else ""
        before = turn.receipt or Receipt(
            message_id=turn.message_id, session=session, tokens=counts, forgot=turn.forgot
        )
        turn.receipt = msgspec.structs.replace(
            before,
            turn="",
            outcome=Outcome.REPREFILLED,
            reason=Reason.REFUSED_BY_CLAIM,
            detail=detail,
            refused=refusal,
        )

    def ended(self, turn: Turn, output: array[int], *, retain: bool) -> SourceTurn | None:
        """Close an ended turn's receipt, and retain the turn if it may be a source.

        Args:
            output: the generated tokens.
            retain: False for a turn that was aborted or whose KV must not be kept.

        Returns:
            The source that the turn became.
        """
        receipt, session = turn.receipt, turn.session
        if receipt is None:
            return None
        source = None
        if session is not None and receipt.turn and retain:
            try:
                source = self._retain(turn, session, receipt.turn, output)
            except Exception:
                log.exception("a turn could not be retained; no later turn can draw on it")
                receipt = msgspec.structs.replace(receipt, turn="")
        with contained("filing a receipt"):
            self._metrics.request(receipt)
            record = TurnRecord(receipt=receipt, finished=True, output_ids=tuple(output))
            self._sender.send(record, turn.scope)
        return source

    def _retain(self, turn: Turn, session: SessionKey, name: str, output: array[int]) -> SourceTurn:
        return retain_turn(
            self._registry,
            self._ledger,
            session,
            name,
            prompt=turn.req.origin_input_ids,
            output=output,
            lineage=turn.lineage,
            spans=turn.spans,
            reuse=turn.reuse,
            cache_salt=turn.space.cache_salt,
            extra_key=turn.space.extra_key,
        )

    def retired(self, slots: int) -> None:
        """Count slots that were freed because no turn continues their KV."""
        self._metrics.retired(slots)

    def progressed(self, ticket: str, counts: ForgetCounts) -> None:
        """Report the progress of a forget whose receipt has been sent."""
        self._sender.update_forgot(ticket, counts)

    def proved(self, proofs: Mapping[str, Proof]) -> None:
        """Report the progress of proofs, by ticket."""
        for ticket, proof in proofs.items():
            self._sender.update_proof(ticket, proof)
