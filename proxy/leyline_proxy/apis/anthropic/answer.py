"""Map a chat completion to a message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ..chat_answers import (
    INVALID_JSON,
    AnswerError,
    Called,
    calls_of,
    content_of,
    count,
    detail,
    first_choice,
    prompt_tokens,
    reasoning_of,
    text_or_none,
    whole_arguments,
)

SIGNATURE = "unsigned"
"""Signature of thinking. The proxy signs nothing, but clients send back only signed thinking."""

PAUSED = {"stop_reason": "compaction", "stop_sequence": None, "stop_details": None}
"""End of a message that is a compaction alone."""

_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}


def map_answer(
    answer: Mapping[str, Any],
    *,
    message_id: str,
    stop_sequences: Sequence[str],
    before: Sequence[Mapping[str, Any]] = (),
    alone: bool = False,
) -> dict[str, Any]:
    """Return the message of a whole chat completion, except its ``usage``.

    Args:
        stop_sequences: the request's.
        before: blocks in front of the model's: a compaction.
        alone: True if these are the whole message.

    Raises:
        AnswerError: it is no chat completion.
    """
    choice = first_choice(answer)
    said = choice.get("message") if choice is not None else None
    if choice is None or not isinstance(said, Mapping):
        raise AnswerError("The engine's answer is no chat completion.")
    content = [{**block} for block in before]
    if alone:
        return {**message_head(message_id, answer.get("model")), "content": content, **PAUSED}
    if thinking := reasoning_of(said):
        content.append({"type": "thinking", "thinking": thinking, "signature": SIGNATURE})
    refusal = text_or_none(said.get("refusal"))
    texts = (content_of(said), refusal)
    content += [{"type": "text", "text": text} for text in texts if text]
    calls = calls_of(said)
    content += [_tool_use(call, f"{message_id}-{i}") for i, call in enumerate(calls)]
    return {
        **message_head(message_id, answer.get("model")),
        "content": content,
        **stop_members(choice, stop_sequences, calls=bool(calls), refused=bool(refusal)),
    }


def message_head(message_id: str, model: object) -> dict[str, Any]:
    """Return the first members of every message."""
    return {"id": message_id, "type": "message", "role": "assistant", "model": str(model or "")}


def stop_members(
    choice: Mapping[str, Any], stop_sequences: Sequence[str], *, calls: bool, refused: bool
) -> dict[str, Any]:
    """Return the reason for the end: ``stop_reason``, ``stop_sequence``, ``stop_details``.

    Args:
        choice: the choice with the ``finish_reason``; some engines name the sequence they found.
        calls: True if the answer calls tools.
    """
    reason = _REASONS.get(str(choice.get("finish_reason")), "end_turn")
    # SGLang's and vLLM's names for the found stop; a number is a token of the model's own.
    found = choice.get("matched_stop", choice.get("stop_reason"))
    sequence = found if isinstance(found, str) and found in stop_sequences else None
    details = None
    if refused:
        reason = "refusal"
    elif reason == "end_turn":
        # Servers report "stop" for a forced call.
        reason = "tool_use" if calls else "stop_sequence" if sequence else reason
    if reason == "refusal":
        details = {"type": "refusal", "category": None, "explanation": None}
    return {
        "stop_reason": reason,
        "stop_sequence": sequence if reason == "stop_sequence" else None,
        "stop_details": details,
    }


def map_usage(usage: Mapping[str, Any] | None, account: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return ``usage`` as Anthropic counts it: input tokens exclude cached tokens.

    Args:
        usage: the engine's; not all engines report cached tokens.
        account: the answer's member ``leyline``, which reports them if the engine gave a receipt.
    """
    usage = usage or {}
    prompt, cached = prompt_tokens(usage, account)
    mapped: dict[str, Any] = {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": count(usage.get("completion_tokens")),
    }
    thought = detail(usage.get("completion_tokens_details"), "reasoning_tokens")
    if thought is not None:
        mapped["output_tokens_details"] = {"thinking_tokens": thought}
    return mapped


def _tool_use(call: Called, fallback: str) -> dict[str, Any]:
    return {
        "type": "tool_use",
        "id": call.id or fallback,
        "name": call.name,
        "input": _input(whole_arguments(call.arguments)),
    }


def _input(text: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {INVALID_JSON: text}
