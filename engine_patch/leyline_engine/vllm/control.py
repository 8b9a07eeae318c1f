"""Commands and questions of the API server, carried out between two steps of the scheduler."""

from __future__ import annotations

import msgspec

from leyline_engine.contract import (
    ClaimProblem,
    ClaimReply,
    LedgerAnswer,
    ProblemCode,
    decode_question,
)
from leyline_engine.ledger import SpanLedger
from leyline_engine.ledger_reading import read_ledger
from leyline_engine.pending import PendingForgets
from leyline_engine.server.claim_clock import ClaimAnswer, ClaimMessage
from leyline_engine.sources import SourceRegistry

CONTROL_METHOD = "leyline_control"
"""Method of the engine core that carries out a :class:`~.claim_clock.ClaimMessage`."""
_NO_CLAIMS = "claims aren't carried out on vLLM yet"


class ControlDesk:
    """Answers of one scheduler.

    Args:
        pending: forgets that wait for running requests.
    """

    def __init__(
        self, registry: SourceRegistry, ledger: SpanLedger, pending: PendingForgets
    ) -> None:
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
        reply = ClaimReply()
        if asked.command:
            reply = ClaimReply(problem=ClaimProblem(ProblemCode.UNSUPPORTED, _NO_CLAIMS))
        ledger = self._ledger_answer(asked.question) if asked.question else None
        return msgspec.json.encode(ClaimAnswer(asked.order, reply, ledger=ledger)).decode()

    def _ledger_answer(self, question: str) -> LedgerAnswer:
        asked = decode_question(question.encode())
        pending = self._pending.of((asked.scope, asked.session))
        return read_ledger(asked, self._ledger, self._registry, pending)
