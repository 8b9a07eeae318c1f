"""What the pipeline tells the current trace; each costs a look-up where nothing is traced."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from leyline_engine.contract import Outcome, Receipt

from ...pipeline.turn import Turn
from .attributes import messages_sent, of_planned, of_receipt, of_request_upstream, of_usage
from .attributes import plain_code as _plain
from .current import Attribute, current_trace


def note_planned(turn: Turn) -> None:
    """A turn is about to be sent."""
    trace = current_trace()
    if not trace.recording:
        return
    trace.describe(of_planned(turn))
    upstream = of_request_upstream(turn)
    if trace.content_chars:
        sent = turn.planned.prepared.messages
        upstream["gen_ai.input.messages"] = messages_sent(sent, trace.content_chars)
    trace.describe_upstream(upstream)


def receipt_span(usage: Mapping[str, Any] | None) -> AbstractContextManager[None]:
    """The engine's answer is complete; a span of the wait for its receipt."""
    trace = current_trace()
    if trace.recording:
        trace.answered(of_usage(usage))
    return trace.stage("receipt")


def note_settled(turn: Turn, receipt: Receipt, ttft_s: float | None) -> None:
    """A turn has been accounted for."""
    trace = current_trace()
    if not trace.recording:
        return
    # By the conventions, only streams have a first chunk.
    trace.describe(of_receipt(receipt, ttft_s if turn.request.stream else None))
    planned = turn.planned.plan.planned
    edited = receipt.reason is not None or planned is not Outcome.UNEDITED
    if edited and receipt.outcome not in (Outcome.SPLICED, Outcome.EDITED):
        reason = receipt.reason.value if receipt.reason is not None else "none"
        told: dict[str, Attribute] = {"reason": reason, "planned": planned.value}
        trace.event("leyline.fallback", told)


def note_bust(cause: str, tokens: int) -> None:
    """Tokens that were in reach had to be prefilled again."""
    trace = current_trace()
    if trace.recording:
        trace.event("leyline.bust", {"cause": cause, "tokens": tokens})


def note_failover(upstream: str, code: str) -> None:
    """An engine failed the request, which goes on to another."""
    trace = current_trace()
    if trace.recording:
        trace.event("leyline.failover", {"upstream": upstream, "reason": _plain(code)})


def note_refused(receipt: Receipt) -> None:
    """The engine didn't run the turn, or not to its end, for the sake of claims."""
    trace = current_trace()
    if trace.recording:
        reason = receipt.reason.value if receipt.reason is not None else "none"
        trace.event("leyline.refusal", {"reason": reason})
