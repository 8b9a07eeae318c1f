"""Commands and questions of the API server, carried out between two steps of the scheduler."""

from __future__ import annotations

import msgspec

from leyline_engine.contract import LedgerAnswer, decode_question
from leyline_engine.records.ledger import SpanLedger
from leyline_engine.records.ledger_reading import read_ledger
from leyline_engine.records.pending import PendingForgets
from leyline_engine.records.sources import SourceRegistry
from leyline_engine.server.claim_clock import ClaimMessage
from leyline_engine.server.claim_desk import ClaimDesk

CONTROL_METHOD = "leyline_control"
"""Method of the engine core that carries out a :class:`~.claim_clock.ClaimMessage`."""


class ControlDesk:
    """Answers of one scheduler.

    Args:
        claims: carries out commands about claims.
        pending: forgets that wait for running requests.
    """

    def __init__(
        self,
        claims: ClaimDesk,
        registry: SourceRegistry,
        ledger: SpanLedger,
        pending: PendingForgets,
    ) -> None:
        self._claims = claims
        self._registry = registry
        self._ledger = ledger
        self._pending = pending

    def answer(self, message: str) -> str:
        """Carry out a message.

        Args:
            message: JSON of a :class:`~.server.claim_clock.ClaimMessage`.

        Returns:
            JSON of a :class:`~.server.claim_clock.ClaimAnswer`.

        Raises:
            msgspec.DecodeError: it isn't one.
        """
        asked = msgspec.json.decode(message, type=ClaimMessage)
        answer = self._claims.carry_out(asked)
        if asked.question:
            found = self._ledger_answer(asked.question)
            answer = msgspec.structs.replace(answer, ledger=found)
        return msgspec.json.encode(answer).decode()

    def _ledger_answer(self, question: str) -> LedgerAnswer:
        asked = decode_question(question.encode())
        pending = self._pending.of((asked.scope, asked.session))
        return read_ledger(asked, self._ledger, self._registry, pending)
