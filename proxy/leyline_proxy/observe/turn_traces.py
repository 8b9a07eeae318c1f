"""Turns in the current trace; each call costs a look-up if nothing is traced."""

from __future__ import annotations

from leyline_engine.contract import Outcome, Receipt

from ..model.session import Session
from ..telemetry.tracing.codes import plain_code
from ..telemetry.tracing.current import current_trace
from ..turns.settled import SettledTurn
from ..turns.turn import Turn
from .attributes import messages_sent, of_planned, of_receipt, of_request_upstream


def note_planned(turn: Turn) -> None:
    """Describe a turn that is about to be sent."""
    trace = current_trace()
    if not trace.recording:
        return
    trace.describe(of_planned(turn))
    upstream = of_request_upstream(turn)
    if trace.content_chars:
        sent = turn.planned.prepared.messages
        upstream["gen_ai.input.messages"] = messages_sent(sent, trace.content_chars)
    trace.describe_upstream(upstream)


def note_failover(upstream: str, code: str) -> None:
    """Record that an engine failed the request, which continues on another."""
    trace = current_trace()
    if trace.recording:
        trace.event("leyline.failover", {"upstream": upstream, "reason": plain_code(code)})


class TurnTraces:
    """Describes turns in the current trace."""

    def settled(self, settled: SettledTurn, session: Session) -> None:
        """Describe the receipt and the losses."""
        trace, turn, receipt = current_trace(), settled.turn, settled.receipt
        if not trace.recording:
            return
        for cause, tokens in settled.cache.busts.items():
            trace.event("leyline.bust", {"cause": cause, "tokens": tokens})
        # By the conventions, only streams have a first chunk.
        trace.describe(of_receipt(receipt, settled.ttft_s if turn.request.stream else None))
        planned = turn.planned.plan.planned
        edited = receipt.reason is not None or planned is not Outcome.UNEDITED
        if edited and receipt.outcome not in (Outcome.SPLICED, Outcome.EDITED):
            trace.event("leyline.fallback", {"reason": _reason(receipt), "planned": planned.value})

    def refused(self, turn: Turn, receipt: Receipt, model: str) -> None:
        """Record a refusal because of claims."""
        trace = current_trace()
        if trace.recording:
            trace.event("leyline.refusal", {"reason": _reason(receipt)})

    def abandoned(self, turn: Turn, model: str) -> None:
        """Do nothing: the request's span covers it."""


def _reason(receipt: Receipt) -> str:
    return receipt.reason.value if receipt.reason is not None else "none"
