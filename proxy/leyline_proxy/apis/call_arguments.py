"""Tool calls and their results in a history, as engines can read them. Pure."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from ..model.messages import Message
from .chat_answers import INVALID_JSON


class _AnyObject(msgspec.Struct):
    """A JSON object, of which no value is made."""


def readable_arguments(arguments: str) -> str:
    """Return arguments that are a JSON object; the same text if they are one already.

    A model may have broken off in the middle of them. An engine that refuses them would refuse
    every later turn of the conversation, too.
    """
    try:
        msgspec.json.decode(arguments, type=_AnyObject)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        empty = arguments.strip() in ("", "null")
        return "{}" if empty else json.dumps({INVALID_JSON: arguments}, ensure_ascii=False)
    return arguments


def readable(message: Message) -> Message:
    """Return a checked chat message that engines can read; the same object if it is one already.

    Its calls have readable arguments, and a tool's null is an empty text: SGLang reads it so, and
    vLLM refuses it.
    """
    if message.get("role") == "tool" and message.get("content", "") is None:
        return {**message, "content": ""}
    calls = message.get("tool_calls")
    if not calls:
        return message
    shown = [_readable(call) for call in calls]
    changed = any(one is not other for one, other in zip(shown, calls, strict=True))
    return {**message, "tool_calls": shown} if changed else message


def _readable(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    given = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(given, str):
        return call
    shown = readable_arguments(given)
    return call if shown is given else {**call, "function": {**function, "arguments": shown}}
