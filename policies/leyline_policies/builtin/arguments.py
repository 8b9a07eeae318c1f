"""What a tool call was asked to do, in a form that can be compared."""

from __future__ import annotations

import json
from typing import Any

from leyline_policies.policy import Message

Asked = dict[int | None, Any]
"""Arguments by the call's position in its message (`ToolCall.position`)."""


def arguments_of(message: Message) -> Asked:
    """The arguments of each call in an assistant message: decoded JSON, else as they are."""
    asked: Asked = {}
    for position, call in enumerate(message.get("tool_calls") or ()):
        if isinstance(call, dict):
            asked[position] = _decoded(call.get("function") or call.get("custom"))
    if isinstance(message.get("function_call"), dict):
        asked[None] = _decoded(message["function_call"])
    return asked


def canonical_arguments(message: Message) -> dict[int | None, str]:
    """`arguments_of` as text that is equal for equal arguments.

    The order of keys makes no difference, nor does a member that is null.
    """
    return {position: canonical(value) for position, value in arguments_of(message).items()}


def canonical(value: Any) -> str:
    """JSON text that is equal for equal values."""
    if isinstance(value, dict):
        value = {key: each for key, each in value.items() if each is not None}
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def _decoded(body: object) -> Any:
    if not isinstance(body, dict):
        return None
    given = body.get("arguments", body.get("input"))
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except (ValueError, RecursionError):
        return given
