"""vLLM's treatment of a chat request before its template sees it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2
import jinja2.meta

from leyline_engine.contract import ChatMessage

from .dialects import APPLIED, Asked, RenderError, optional, refuse, required
from .template import chat_environment

_STEERS = ("chat_template", "documents", "continue_final_message", "add_special_tokens")
"""Members that change the prompt in ways that aren't repeated here."""
_EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "max"})
_PART_EXTRAS = frozenset({"cache_control"})
"""Members of text parts that templates may see besides."""
_ATTRIBUTION = "x-anthropic-billing-header"
"""Beginning of a line that some clients change in every request; vLLM drops it."""


@dataclass(frozen=True, slots=True)
class VllmDialect:
    """vLLM 0.32 with a Jinja template (``chat_utils.py``, ``hf.py``, ``protocol.py``).

    * Messages keep the members that vLLM knows for their role; thinking has two names.
    * Texts of parts are joined by newlines. For templates that take parts, all contents are parts,
      except tool results.
    * Calls and tools have the order of vLLM's records; arguments that are no object become empty.
    * Options that are null or ``auto``, or that the template doesn't name, don't exist.

    Args:
        parts: True if the template takes lists of content parts, as vLLM detected.
        defaults: template options that the server was started with.
        names: the template's variables.
        developer: True if the template knows the role; else its message becomes the system's.
        withholds_tools: True if a request with ``tool_choice: none`` has no tools in its prompt.
    """

    parts: bool
    defaults: Mapping[str, Any] = field(default_factory=dict)
    names: frozenset[str] = frozenset()
    developer: bool = False
    withholds_tools: bool = False

    def asked(self, body: Mapping[str, Any]) -> Asked:
        """See :class:`~.dialects.Dialect`."""
        refuse(body, _STEERS)
        if body.get("add_generation_prompt", True) is not True:
            raise RenderError("no generation prompt is asked for")
        if body.get("truncate_prompt_tokens") is not None:
            raise RenderError("truncate_prompt_tokens changes the prompt")
        given = dict(optional(body, "chat_template_kwargs", dict) or {})
        effort = body.get("reasoning_effort")
        if effort is not None:
            if not isinstance(effort, str) or effort not in _EFFORTS:
                raise RenderError("reasoning_effort is none that is known")
            given.setdefault("enable_thinking", effort != "none")
            given["reasoning_effort"] = effort
        kwargs = {**self.defaults, **{k: v for k, v in given.items() if v not in (None, "auto")}}
        if not (APPLIED - {"reasoning_effort"}).isdisjoint(kwargs):
            raise RenderError("an option of the chat template is none of the template's")
        tools = optional(body, "tools", list) or []
        if self.withholds_tools and body.get("tool_choice") == "none":
            tools = []
        known = {name: value for name, value in kwargs.items() if name in self.names}
        return Asked([_tool(tool) for tool in tools] or None, known)

    def conversation(self, messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
        """See :class:`~.dialects.Dialect`."""
        roles = [message.get("role") for message in messages]
        if self.developer or "developer" not in roles:
            return messages
        first, *rest = messages
        if roles[0] != "developer" or not {"developer", "system"}.isdisjoint(roles[1:]):
            raise RenderError("the engine joins the system's messages")
        if any(part["text"].startswith(_ATTRIBUTION) for part in _parts(first)):
            raise RenderError("a message begins with another client's attribution")
        return [{**first, "role": "system"}, *rest]

    def message(self, message: ChatMessage) -> ChatMessage:
        """See :class:`~.dialects.Dialect`."""
        role = required(message, "role", str)
        if "author" in message:
            raise RenderError("a message has an author, as those of another form")
        shown: dict[str, Any] = {"role": role, "content": self._content(message, role)}
        if role == "assistant":
            calls = optional(message, "tool_calls", list)
            if calls:
                shown["tool_calls"] = [_call(call) for call in calls]
            shown |= _thinking(message)
        elif role == "tool" and "tool_call_id" in message:
            shown["tool_call_id"] = optional(message, "tool_call_id", str)
        if "name" in message:
            shown["name"] = required(message, "name", str)
        if (task := optional(message, "task", str)) is not None:
            shown["task"] = task
        if role == "developer":
            if message.get("tools") is not None:
                raise RenderError("a developer's message has tools")
            shown["tools"] = None
        return shown

    def _content(self, message: ChatMessage, role: str) -> str | list[dict[str, Any]]:
        if role != "assistant" and message.get("content", "") is None:
            raise RenderError("a content is null")
        parts = _parts(message)
        if role == "system":
            parts = [part for part in map(_without_attribution, parts) if part is not None]
        texts = [part["text"] for part in parts]
        if not self.parts:
            return "\n".join(filter(None, texts))
        return "\n".join(texts) if role == "tool" else parts


def vllm_dialect(
    chat_template: str, *, parts: bool, defaults: Mapping[str, Any], withholds_tools: bool
) -> VllmDialect:
    """Return the dialect of an engine with a template; see :class:`VllmDialect`.

    Raises:
        jinja2.TemplateError: the template isn't one.
    """
    names = jinja2.meta.find_undeclared_variables(chat_environment().parse(chat_template))
    developer = any(name in chat_template for name in ('"developer"', "'developer'"))
    return VllmDialect(parts, dict(defaults), frozenset(names), developer, withholds_tools)


def _parts(message: ChatMessage) -> list[dict[str, Any]]:
    content = message.get("content")
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise RenderError("a content is neither text nor parts")
    return [_part(part) for part in content]


def _part(part: object) -> dict[str, Any]:
    match part:
        case {"type": "text", "text": str(text), **rest} if rest.keys() <= _PART_EXTRAS:
            extras = {str(name): value for name, value in rest.items()}
            return {"type": "text", "text": text, **extras}
    raise RenderError("a content has parts that are no plain text")


def _without_attribution(part: dict[str, Any]) -> dict[str, Any] | None:
    """Return a part of the system's without that line; None if nothing is left."""
    text: str = part["text"]
    if not text.startswith(_ATTRIBUTION):
        return part
    rest = text.partition("\n")[2]
    return {**part, "text": rest} if rest else None


def _thinking(message: ChatMessage) -> dict[str, str]:
    named = (optional(message, name, str) for name in ("reasoning", "reasoning_content"))
    found = next((text for text in named if text is not None), None)
    return {} if found is None else {"reasoning": found, "reasoning_content": found}


def _call(call: object) -> dict[str, Any]:
    function = required(call, "function", dict)
    assert isinstance(call, Mapping)  # noqa: S101 - it has a member
    if call.get("type") != "function":
        raise RenderError("a tool call is no function's")
    shown = {
        "arguments": _object(required(function, "arguments", str)),
        "name": required(function, "name", str),
    }
    return {
        "id": required(call, "id", str),
        "function": shown | {name: function[name] for name in function if name not in shown},
        "type": "function",
        **{name: call[name] for name in call if name not in ("id", "function", "type")},
    }


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return {}
    except (ValueError, RecursionError) as error:
        raise RenderError("a tool call's arguments can't be read") from error
    if not isinstance(value, dict):
        return {}
    if "\\ud" in text.lower():  # half a surrogate pair is JSON, but no text to tokenise
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise RenderError("a tool call's arguments are no text") from error
    return value


def _tool(tool: object) -> dict[str, Any]:
    function = required(tool, "function", dict)
    assert isinstance(tool, Mapping)  # noqa: S101 - it has a member
    if tool.get("type", "function") != "function":
        raise RenderError("a tool is no function")
    deferred = optional(tool, "defer_loading", bool)
    own = optional(function, "defer_loading", bool)
    members = {
        "name": required(function, "name", str),
        "description": optional(function, "description", str),
        "parameters": optional(function, "parameters", dict),
    }
    rest = {
        "strict": optional(function, "strict", bool),
        "defer_loading": deferred if own is None else own,
    }
    members |= {name: value for name, value in rest.items() if value is not None}
    shown = {"type": "function", "function": members}
    return shown if deferred is None else {**shown, "defer_loading": deferred}
