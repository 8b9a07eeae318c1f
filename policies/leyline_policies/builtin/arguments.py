"""Arguments of tool calls, in a form that can be compared."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from leyline_policies.policy import Message

Asked = Mapping[int | None, Any]
"""Arguments by the call's position in its message (`ToolCall.position`)."""

_NOTHING: Asked = MappingProxyType({})
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=str)


def arguments_of(message: Message) -> Asked:
    """Return the arguments of each call in an assistant message: decoded JSON, else as they are."""
    calls, function = message.get("tool_calls"), message.get("function_call")
    if not calls and not function:
        return _NOTHING
    asked: dict[int | None, Any] = {}
    for position, call in enumerate(calls or ()):
        if isinstance(call, dict):
            asked[position] = _decoded(call.get("function") or call.get("custom"))
    if isinstance(function, dict):
        asked[None] = _decoded(function)
    return asked


def canonical_arguments(message: Message) -> Mapping[int | None, str]:
    """Return `arguments_of` as text that is equal for equal arguments.

    The order of keys makes no difference, nor does a member that is null.
    """
    asked = arguments_of(message)
    return {place: canonical(value) for place, value in asked.items()} if asked else _NOTHING


def canonical(value: Any) -> str:
    """Return JSON text that is equal for equal values."""
    if isinstance(value, dict):
        value = {key: each for key, each in value.items() if each is not None}
    return _ENCODER.encode(value)


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
