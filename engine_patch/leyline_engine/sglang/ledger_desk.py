"""Questions about one SGLang scheduler's ledger, as they reach every rank."""

from __future__ import annotations

from leyline_engine.contract import LedgerAnswer, decode_question
from leyline_engine.records.ledger import SpanLedger
from leyline_engine.records.ledger_reading import read_ledger
from leyline_engine.records.pending import PendingForgets
from leyline_engine.records.sources import SourceRegistry
from leyline_engine.sglang.ranks import Replica


class LedgerDesk:
    """Answers of one scheduler. It changes nothing, so that ranks stay alike.

    Args:
        pending: forgets that wait for running requests.
        replica: this one of the server's data-parallel replicas.
    """

    def __init__(
        self,
        registry: SourceRegistry,
        ledger: SpanLedger,
        pending: PendingForgets,
        replica: Replica,
    ) -> None:
        self._registry = registry
        self._ledger = ledger
        self._pending = pending
        self._replica = replica

    def answer(self, question: str) -> LedgerAnswer | None:
        """Return who holds or has read spans; None if the session is another replica's.

        Args:
            question: JSON of a :class:`~.contract.LedgerQuestion`.

        Raises:
            msgspec.DecodeError: it isn't one.
        """
        asked = decode_question(question.encode())
        session = (asked.scope, asked.session)
        if not self._replica.owns(session):
            return None
        return read_ledger(asked, self._ledger, self._registry, self._pending.of(session))
