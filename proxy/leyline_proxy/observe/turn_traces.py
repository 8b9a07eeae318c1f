"""Turns in the current trace; each call costs a look-up if nothing is traced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from leyline_engine.contract import Outcome, Receipt

from ..model.session import Session
from ..telemetry.tracing.current import Attribute, current_trace, plain_code
from ..telemetry.tracing.usage import MAX_INT
from ..turns.ports import TurnObserver
from ..turns.settled import SettledTurn
from ..turns.turn import Turn

_REQUEST_NUMBERS = {
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "max_tokens": "gen_ai.request.max_tokens",
    "n": "gen_ai.request.choice.count",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "seed": "gen_ai.request.seed",
    "temperature": "gen_ai.request.temperature",
    "top_k": "gen_ai.request.top_k",
    "top_p": "gen_ai.request.top_p",
}


def of_planned(turn: Turn) -> dict[str, Attribute]:
    """Return the attributes of a planned turn."""
    plan, prepared = turn.planned.plan, turn.planned.prepared
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": turn.request.model,
        "gen_ai.conversation.id": turn.identity.session_id,
        "leyline.upstream": turn.replica.name,
        "leyline.message_id": turn.message_id,
        "leyline.turn": turn.index,
        "leyline.planned": plan.planned.value,
        "leyline.edits": len(plan.edits),
        "leyline.policy_faults": len(prepared.faults),
    }


def of_request_upstream(turn: Turn) -> dict[str, Attribute]:
    """Return the attributes of the request to the engine, without messages."""
    body = turn.request.body
    found: dict[str, Attribute] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": turn.status.engine,
        "gen_ai.request.model": turn.request.model,
        "gen_ai.request.stream": turn.request.stream,
        "gen_ai.conversation.id": turn.identity.session_id,
    }
    for name, attribute in _REQUEST_NUMBERS.items():
        value = body.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if isinstance(value, float) or abs(value) <= MAX_INT:
            found[attribute] = value
    return found


def of_receipt(receipt: Receipt, ttft_s: float | None) -> dict[str, Attribute]:
    """Return the attributes of a turn's result; none of its tokens if nobody counted them."""
    tokens = receipt.tokens
    found: dict[str, Attribute] = {"leyline.outcome": receipt.outcome.value}
    if tokens.prompt:
        found |= {
            "gen_ai.usage.input_tokens": tokens.prompt,
            "gen_ai.usage.cache_read.input_tokens": tokens.served,
            "leyline.tokens.cached": tokens.prefix,
            "leyline.tokens.spliced": tokens.spliced,
            "leyline.tokens.reused": tokens.reused,
            "leyline.tokens.prefilled": tokens.prefilled,
            "leyline.tokens.freed": tokens.freed,
        }
    if receipt.reason is not None:
        found["leyline.reason"] = receipt.reason.value
    if receipt.state:
        found["leyline.state"] = receipt.state
    if ttft_s is not None:
        found["gen_ai.response.time_to_first_chunk"] = ttft_s
    return found


def messages_sent(messages: Sequence[Mapping[str, Any]], limit: int) -> str:
    """Return the latest messages sent upstream that fit, in the form of the conventions.

    Args:
        limit: characters of text in all; the oldest text that still fits in part is cut. Messages
            without text are left out.
    """
    kept: list[dict[str, Any]] = []
    left = limit
    for message in reversed(messages):
        if left <= 0:
            break
        parts: list[dict[str, Any]] = []
        for text in _texts(message):
            shown = _valid(text[:left])
            left -= len(shown)
            parts.append({"type": "text", "content": shown})
            if left <= 0:
                break
        if parts:
            kept.append({"role": _valid(str(message.get("role", ""))[:32]), "parts": parts})
    return orjson.dumps(kept[::-1]).decode()


def _valid(text: str) -> str:
    """Return ``text`` with characters that UTF-8 can't encode replaced."""
    return text.encode("utf-8", "replace").decode()


def _texts(message: Mapping[str, Any]) -> Iterator[str]:
    """Yield the non-empty texts of a message, including those of its tool calls."""
    return (text for text in _members(message) if isinstance(text, str) and text)


def _members(message: Mapping[str, Any]) -> Iterator[Any]:
    content = message.get("content")
    if isinstance(content, list):
        yield from (part.get("text") for part in content if isinstance(part, Mapping))
    else:
        yield content
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            yield function.get("name")
            yield function.get("arguments")


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


class TurnTraces(TurnObserver):
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


def _reason(receipt: Receipt) -> str:
    return receipt.reason.value if receipt.reason is not None else "none"
