"""Map a request of the Messages API to a chat request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...model.fields import BEGUN_ANSWER
from ..fields import FieldError
from .blocks import conversation, system_prompt
from .compaction import Opens
from .deferred import offered_tools

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


_MAPPED = frozenset(
    {
        "system",
        "messages",
        "tools",
        "tool_choice",
        "max_tokens",
        "stop_sequences",
        "thinking",
        "output_config",
        "output_format",
        "context_management",
        "stream_options",
    }
)

_WITHOUT_EFFECT = frozenset(
    {
        "anthropic_beta",
        "anthropic_version",
        "betas",
        "billing_policy",
        "cache_control",
        "diagnostics",
        "fallback_credit_token",
        "fallbacks",
        "inference_geo",
        "metadata",
        "service_tier",
        "speed",
        "user_profile_id",
        "workspace_id",
    }
)
"""Members for Anthropic only: accounts, places, and caching, which is automatic here."""

_SERVER_SIDE = {
    "compaction": None,
    "container": None,
    "mcp_servers": None,
    # On this code the SDK sends the whole conversation instead.
    "thread": "thread_unsupported_request",
}
"""Members for work or state of Anthropic's servers, and the code of their refusal: ignoring them
would give a wrong answer."""

_THINKING = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}
_EFFORT = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}


@dataclass(frozen=True, slots=True)
class ChatMapping:
    """A chat request, and the facts needed to map its answer back."""

    body: dict[str, Any]
    origins: tuple[str, ...]
    """Source field of each chat message."""
    stop_sequences: tuple[str, ...]
    foreign: frozenset[str] = frozenset()
    """Types of blocks that only another provider can read."""


def map_request(
    body: Mapping[str, Any], *, runs: bool = True, opens: Opens = lambda _: None
) -> ChatMapping:
    """Map a request. Members that aren't Anthropic's are kept, as on the chat route.

    Args:
        runs: False if tokens are only counted; ``max_tokens`` isn't required then.
        opens: opens compaction blocks.

    Raises:
        FieldError: a field is wrong; the error names it and what it should be.
    """
    for name, code in _SERVER_SIDE.items():
        if body.get(name):
            message = f"{name} needs Anthropic's own servers; leave it out."
            raise FieldError(name, message, code=code)
    foreign: set[str] = set()
    talk = conversation(body.get("messages"), opens, foreign)
    placed = [*system_prompt(body.get("system")), *talk]
    tools = chat_tools(body.get("tools"), body.get("messages"))
    stops = _stop_sequences(body.get("stop_sequences"))
    chat = {
        name: value
        for name, value in body.items()
        if name not in _MAPPED and name not in _WITHOUT_EFFECT and name not in _SERVER_SIDE
    }
    chat["messages"] = [item.message for item in placed]
    if _begins_answer(chat["messages"][-1]):
        chat |= BEGUN_ANSWER
    if tools:
        chat["tools"] = tools
    chat |= chat_choice(body.get("tool_choice"), tools)
    if runs:
        chat["max_tokens"] = _max_tokens(body.get("max_tokens"))
    if stops:
        chat["stop"] = stops
    if body.get("stream") is True:
        chat["stream_options"] = {"include_usage": True}
    chat |= _thinking(body.get("thinking"), body.get("chat_template_kwargs"))
    chat |= _output(body.get("output_config"), body.get("output_format"))
    if edits := _context_management(body.get("context_management")):
        chat["context_management"] = edits
    origins = tuple(item.origin for item in placed)
    return ChatMapping(chat, origins, tuple(stops), frozenset(foreign))


def without_beginning(chat: dict[str, Any]) -> None:
    """Take the members of a begun answer out of a chat request, for engines without them."""
    for name in BEGUN_ANSWER:
        chat.pop(name, None)


def _begins_answer(message: Mapping[str, Any]) -> bool:
    """Return True if the last message is the beginning of the answer, which the model goes on
    with; most templates would begin another one, and SGLang would take it for the user's."""
    said = message["role"] == "assistant" and "tool_calls" not in message
    return said and bool(str(message["content"] or "").strip())


def _max_tokens(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise FieldError(
        "max_tokens", "max_tokens must be a number of tokens; 0 prefills the prompt only."
    )


def _stop_sequences(value: object) -> list[str]:
    if value is None:
        return []
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    raise FieldError("stop_sequences", "stop_sequences must be a list of strings.")


def _thinking(config: object, given: object) -> dict[str, Any]:
    """Return the template options for thinking, under both names that chat templates use."""
    if config is None:
        return {}
    kind = config.get("type") if isinstance(config, dict) else None
    if not isinstance(kind, str) or kind not in _THINKING:
        known = ", ".join(_THINKING)
        raise FieldError("thinking.type", f"thinking.type must be one of {known}.")
    wanted = _THINKING[kind]
    own = given if isinstance(given, dict) else {}
    return {"chat_template_kwargs": {"enable_thinking": wanted, "thinking": wanted, **own}}


def _output(config: object, output_format: object) -> dict[str, Any]:
    if config is not None and not isinstance(config, dict):
        raise FieldError("output_config", "output_config must be an object.")
    config = config or {}
    members: dict[str, Any] = {}
    effort = config.get("effort")
    if effort is not None:
        if not isinstance(effort, str) or effort not in _EFFORT:
            field = "output_config.effort"
            raise FieldError(field, f"{field} must be one of {', '.join(_EFFORT)}.")
        members["reasoning_effort"] = _EFFORT[effort]
    wanted = config.get("format") or output_format
    if wanted is None:
        return members
    match wanted:
        case {"type": "json_schema", "schema": dict(schema)}:
            described = {"name": "response", "schema": schema, "strict": True}
            return members | {"response_format": {"type": "json_schema", "json_schema": described}}
    raise FieldError(
        "output_config.format", "output_config.format must have type json_schema and a schema."
    )


def _context_management(raw: object) -> object:
    """Return the member for the chat route, which takes no null and only one form of ``all``."""
    edits = raw.get("edits") if isinstance(raw, dict) else None
    if raw == {} or not isinstance(raw, dict) or not isinstance(edits, list):
        return raw
    return raw | {"edits": [_edit(edit) for edit in edits]}


def _edit(edit: object) -> object:
    if not isinstance(edit, dict):
        return edit
    return {
        name: "all" if name == "keep" and value == {"type": "all"} else value
        for name, value in edit.items()
        if value is not None
    }
