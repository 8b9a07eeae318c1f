"""A vLLM scheduler's account of its turns: receipts, counters, and the turns it retains."""

from __future__ import annotations

from array import array

from leyline_engine.admit.receipts import receipt_of
from leyline_engine.contract import TokenCounts, TurnRecord
from leyline_engine.records.sources import SourceTurn
from leyline_engine.scheduler.turn_accounts import TurnAccounts
from leyline_engine.vllm.turn import Turn


class Accounts(TurnAccounts):
    """Receipts of one scheduler of vLLM's."""

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
        """Close an ended turn's receipt; see :meth:`.TurnAccounts.close`."""
        output = array("q", turn.req.output_token_ids)
        return self.close(turn, turn.prompt, output, retain=retain)
