"""A scheduler's account of its turns: receipts, counters, and the turns it retains as sources.

Shared by the engines that have a scheduler of their own and a channel to an HTTP process.
"""

from __future__ import annotations

import logging
from array import array
from typing import TYPE_CHECKING, Protocol

import msgspec

from leyline_engine.admit.receipts import AccountedTurn
from leyline_engine.contract import (
    Capability,
    ClaimRefusal,
    ForgetCounts,
    Outcome,
    Reason,
    Receipt,
    ReusePayload,
    SpanLabel,
    TokenCounts,
    TurnRecord,
)
from leyline_engine.metrics import EngineMetrics
from leyline_engine.records.ledger import SpanLedger
from leyline_engine.records.publications import Space
from leyline_engine.records.retention import retain_turn
from leyline_engine.records.sources import SessionKey, SourceRegistry, SourceTurn
from leyline_engine.scheduler.containment import contained

if TYPE_CHECKING:  # its socket's library is there only where engines serve
    from leyline_engine.server.channel import Sender

log = logging.getLogger(__name__)


class EndedTurn(AccountedTurn, Protocol):
    """The state of a turn, as far as it is needed when the turn ends."""

    receipt: Receipt | None
    reuse: ReusePayload | None

    @property
    def scope(self) -> str: ...

    @property
    def session(self) -> SessionKey | None: ...

    @property
    def spans(self) -> tuple[SpanLabel, ...]: ...

    @property
    def space(self) -> Space: ...


class TurnAccounts:
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

    def close(
        self, turn: EndedTurn, prompt: array[int], output: array[int], *, retain: bool
    ) -> SourceTurn | None:
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
                source = retain_turn(
                    self._registry,
                    self._ledger,
                    session,
                    receipt.turn,
                    prompt=prompt,
                    output=output,
                    lineage=turn.lineage,
                    spans=turn.spans,
                    reuse=turn.reuse,
                    cache_salt=turn.space.cache_salt,
                    extra_key=turn.space.extra_key,
                )
            except Exception:
                log.exception("a turn could not be retained; no later turn can draw on it")
                receipt = msgspec.structs.replace(receipt, turn="")
        with contained("filing a receipt"):
            self._metrics.request(receipt)
            record = TurnRecord(receipt=receipt, finished=True, output_ids=tuple(output))
            self._sender.send(record, turn.scope)
        return source

    def refused(self, turn: EndedTurn, prompt: int, refusal: ClaimRefusal, *, began: bool) -> None:
        """Note that a turn's request can't run, or can't continue, because of claims.

        Args:
            prompt: tokens of its prompt.
            began: True if it ran already.
        """
        detail = "decoding outgrew what claims leave" if began else "claims leave too little room"
        session = turn.payload.session if turn.payload is not None else ""
        before = turn.receipt or Receipt(
            message_id=turn.message_id,
            session=session,
            tokens=TokenCounts(prompt=prompt),
            forgot=turn.forgot,
        )
        turn.receipt = msgspec.structs.replace(
            before,
            turn="",
            outcome=Outcome.REPREFILLED,
            reason=Reason.REFUSED_BY_CLAIM,
            detail=detail,
            refused=refusal,
        )

    def retired(self, tokens: int) -> None:
        """Count tokens whose KV was freed because no turn continues it."""
        self._metrics.retired(tokens)

    def progressed(self, ticket: str, counts: ForgetCounts) -> None:
        """Report the progress of a forget whose receipt has been sent."""
        self._sender.update_forgot(ticket, counts)
