"""One log line per turn: names and numbers, no text."""

from __future__ import annotations

import structlog

from leyline_engine.contract import Receipt

from ..model.session import Session
from ..turns.ports import TurnObserver
from ..turns.settled import SettledTurn
from ..turns.turn import Turn

log = structlog.get_logger("leyline.turn")


class TurnLog(TurnObserver):
    """Writes turns to the log."""

    def settled(self, settled: SettledTurn, session: Session) -> None:
        """Log the result of a turn."""
        turn, receipt = settled.turn, settled.receipt
        log.info(
            "turn",
            tenant=turn.request.tenant.name,
            session=turn.identity.session_id,
            turn=turn.index,
            outcome=receipt.outcome.value,
            reason=receipt.reason.value if receipt.reason else None,
            prompt_tokens=receipt.tokens.prompt,
            cached_tokens=receipt.tokens.prefix,
            spliced_tokens=receipt.tokens.spliced,
            reused_tokens=receipt.tokens.reused,
            edits=len(turn.planned.plan.edits),
            faults=len(turn.planned.prepared.faults),
            ms=round(turn.request.clock.elapsed_s * 1000, 1),
        )

    def refused(self, turn: Turn, receipt: Receipt, model: str) -> None:
        """Log the numbers of the claims that prevented a turn."""
        refused = receipt.refused
        log.info(
            "turn_refused",
            tenant=turn.request.tenant.name,
            session=turn.identity.session_id,
            own_claims=len(refused.own) if refused is not None else 0,
            other_claims=refused.others if refused is not None else 0,
        )
