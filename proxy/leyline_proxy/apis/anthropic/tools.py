"""Map tool definitions and the choice among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .deferred import offered_tools
from .errors import FieldError

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_tools(tools: object, messages: object = ()) -> list[dict[str, Any]]:
    """Return custom tools as functions.

    Args:
        messages: the request's; they may load, add and remove tools.

    Raises:
        FieldError: a definition is wrong, or Anthropic defines or runs the tool itself.
    """
    if tools is not None and not isinstance(tools, list):
        raise FieldError("tools", "tools must be a list of tool definitions.")
    return [_function(where, tool) for where, tool in offered_tools(tools or [], messages)]


def _function(where: str, tool: object) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise FieldError(where, f"{where} must be an object with name and input_schema.")
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise FieldError(
            f"{where}.type",
            f"{where}.type: {str(kind)[:80]!r} is a tool of Anthropic's own, which isn't offered "
            "here. Leave it out, or define a custom tool with an input_schema.",
        )
    name, schema = tool.get("name"), tool.get("input_schema")
    if not isinstance(name, str) or not name:
        raise FieldError(f"{where}.name", f"{where}.name must be a string.")
    if not isinstance(schema, dict):
        raise FieldError(f"{where}.input_schema", f"{where}.input_schema must be a JSON schema.")
    optional = {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": {"name": name, **optional, "parameters": schema}}


def chat_choice(choice: object, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the members of a chat request that choose among its tools.

    Args:
        tools: the result of :func:`chat_tools`.

    Raises:
        FieldError: the choice is unknown, or no tool matches it.
    """
    if choice is None:
        return {}
    kind = choice.get("type") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or kind not in (*_CHOICES, "tool"):
        raise FieldError(
            "tool_choice", "tool_choice must be an object with type auto, any, tool or none."
        )
    if not tools:
        if kind in ("any", "tool"):
            raise FieldError("tool_choice", f"tool_choice of type {kind} needs tools.")
        return {}
    members: dict[str, Any] = {"tool_choice": _CHOICES.get(str(kind))}
    if kind == "tool":
        name = choice.get("name")
        if name not in [tool["function"]["name"] for tool in tools]:
            raise FieldError("tool_choice.name", "tool_choice.name must be the name of a tool.")
        members["tool_choice"] = {"type": "function", "function": {"name": name}}
    if choice.get("disable_parallel_tool_use") is True:
        members["parallel_tool_calls"] = False
    return members
