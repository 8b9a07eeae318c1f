"""A scheduler's account of its turns: receipts, counters, and the turns it retains as sources."""

from __future__ import annotations

from array import array
from collections.abc import Mapping

from leyline_engine.admit.receipts import receipt_of
from leyline_engine.contract import (
    Proof,
    TurnRecord,
)
from leyline_engine.records.sources import SourceTurn
from leyline_engine.scheduler.turn_accounts import TurnAccounts
from leyline_engine.sglang.splicer import as_admitted
from leyline_engine.sglang.turn import Turn


class Accounts(TurnAccounts):
    """Receipts of one scheduler of SGLang's."""

    def admitted(self, turn: Turn) -> None:
        """Report that a turn's request runs: its reuse, and the outcome of its edits."""
        checked, plan = turn.checked, turn.plan
        assert checked is not None and plan is not None  # noqa: S101 - set before READY
        executed, counts = as_admitted(plan, turn.req.prefix_len, turn.loaded)
        turn.receipt = receipt_of(turn, checked, executed, counts)
        # SGLang takes all in front of the first chunk for cached, what stage rows computed, too.
        turn.req.already_computed = max(0, turn.req.prefix_len - counts.served)
        self._sender.send(TurnRecord(receipt=turn.receipt), turn.scope)

    def ended(self, turn: Turn, output: array[int], *, retain: bool) -> SourceTurn | None:
        """Close an ended turn's receipt; see :meth:`.TurnAccounts.close`."""
        return self.close(turn, turn.req.origin_input_ids, output, retain=retain)

    def proved(self, proofs: Mapping[str, Proof]) -> None:
        """Report the progress of proofs, by ticket."""
        for ticket, proof in proofs.items():
            self._sender.update_proof(ticket, proof)
