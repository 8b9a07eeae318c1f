"""A vLLM scheduler's account of its turns: receipts, counters, and the turns it retains."""

from __future__ import annotations

import logging
from array import array

import msgspec

from leyline_engine.containment import contained
from leyline_engine.contract import Capability, ForgetCounts, TokenCounts, TurnRecord
from leyline_engine.ledger import SpanLedger
from leyline_engine.metrics import EngineMetrics
from leyline_engine.receipts import receipt_of
from leyline_engine.retention import retain_turn
from leyline_engine.server.channel import Sender
from leyline_engine.sources import SourceRegistry, SourceTurn
from leyline_engine.vllm.turn import Turn

log = logging.getLogger(__name__)


class Accounts:
    """Receipts of one scheduler.

    Args:
        registry: takes turns that ended.
        ledger: learns the names of the spans they wrote.
        sender: takes receipts to the API server.
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
        assert checked is not None and plan is not None  # noqa: S101 - set when it was planned
        counts = TokenCounts(
            prompt=plan.length,
            prefix=plan.prefix,
            spliced=plan.spliced,
            reused=plan.reused,
            prefilled=plan.prefilled,
        )
        turn.receipt = receipt_of(turn, checked, plan, counts)
        self._sender.send(TurnRecord(receipt=turn.receipt), turn.scope)

    def ended(self, turn: Turn, *, retain: bool) -> SourceTurn | None:
        """Close an ended turn's receipt, and retain the turn if it may be a source.

        Args:
            retain: False for a turn without an answer, or whose KV must not be kept.

        Returns:
            The source that the turn became.
        """
        receipt, source = turn.receipt, None
        if receipt is None:
            return None
        output = array("q", turn.req.output_token_ids)
        if turn.session is not None and receipt.turn and retain:
            try:
                source = self._retain(turn, receipt.turn, output)
            except Exception:
                log.exception("a turn could not be retained; no later turn can draw on it")
                receipt = msgspec.structs.replace(receipt, turn="")
        with contained("filing a receipt"):
            self._metrics.request(receipt)
            record = TurnRecord(receipt=receipt, finished=True, output_ids=tuple(output))
            self._sender.send(record, turn.scope)
        return source

    def _retain(self, turn: Turn, name: str, output: array[int]) -> SourceTurn:
        assert turn.session is not None  # noqa: S101 - the caller's contract
        return retain_turn(
            self._registry,
            self._ledger,
            turn.session,
            name,
            prompt=turn.prompt,
            output=output,
            lineage=turn.lineage,
            spans=turn.spans,
            reuse=turn.reuse,
            cache_salt=turn.space.cache_salt,
            extra_key=turn.space.extra_key,
        )

    def retired(self, tokens: int) -> None:
        """Count tokens whose KV was freed because no turn continues it."""
        self._metrics.retired(tokens)

    def progressed(self, ticket: str, counts: ForgetCounts) -> None:
        """Report the progress of a forget whose receipt has been sent."""
        self._sender.update_forgot(ticket, counts)
