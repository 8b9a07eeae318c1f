"""An engine's treatment of a chat request before its template sees it.

Engines agree on the API but differ in the data for a chat template: the joining of parts, the
members that survive, the form of a tool. A dialect repeats one engine's way exactly, and refuses
requests that it can't repeat; the engine's own tokens are used then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from leyline_engine.contract import TEXT_PARTS, ChatMessage, normalize_messages

Tool = Mapping[str, Any]


class RenderError(ValueError):
    """A conversation that can't be rendered here as the engine would."""


class PromptTooLargeError(RenderError):
    """A prompt whose text is too long to be tokenised.

    Args:
        size: bytes of the text.
    """

    def __init__(self, size: int) -> None:
        super().__init__("the prompt's text is too long")
        self.size = size


@dataclass(frozen=True, slots=True)
class Asked:
    """The template's inputs from a request's body, apart from the messages."""

    tools: Sequence[Tool] | None
    kwargs: Mapping[str, Any]


class Dialect(Protocol):
    """One engine's way. All methods raise :class:`RenderError` for input that they can't repeat."""

    def asked(self, body: Mapping[str, Any]) -> Asked:
        """Return the tools and options of a chat request."""

    def conversation(self, messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
        """Return as many messages, with the changes that depend on their places."""

    def message(self, message: ChatMessage) -> ChatMessage:
        """Return a message in the template's form, independent of its neighbours."""


@dataclass(frozen=True, slots=True)
class ContractDialect:
    """The dialect of :mod:`leyline_engine.contract.chat`. Contents are text.

    Args:
        parts: True if the template takes lists of content parts.
    """

    parts: bool

    def asked(self, body: Mapping[str, Any]) -> Asked:
        """See :class:`Dialect`."""
        if body.get("add_generation_prompt") is False:
            raise RenderError("no generation prompt is asked for")
        refuse(body, ("continue_final_message", "chat_template", "documents"))
        kwargs = body.get("chat_template_kwargs")
        return Asked(body.get("tools") or None, kwargs if isinstance(kwargs, dict) else {})

    def conversation(self, messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
        """See :class:`Dialect`."""
        return messages

    def message(self, message: ChatMessage) -> ChatMessage:
        """See :class:`Dialect`."""
        content = message.get("content")
        if isinstance(content, list) and not all(map(_is_text, content)):
            raise RenderError("a content has parts that are no text")
        return normalize_messages([message], parts=self.parts)[0]


_SGLANG_ROLES = frozenset(
    {"system", "assistant", "tool", "function", "developer", "latest_reminder", "root"}
)
_SGLANG_PHASES = (None, "commentary", "final_answer")
_SGLANG_STEERS = (
    "continue_final_message",
    "input_ids",
    "reasoning",
    "reasoning_effort",
    "task",
    "thinking",
)
"""Members that change the prompt in ways that depend on the model."""

APPLIED = frozenset(
    {
        "conversation",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "reasoning_effort",
    }
)
"""Options that control transformers or an engine and aren't just variables of a template."""

_SCHEMA_TYPES = frozenset({"string", "number", "integer", "boolean", "array", "object", "null"})


@dataclass(frozen=True, slots=True)
class SglangDialect:
    """SGLang 0.5.23 with a Jinja template (``serving_chat.py``, ``protocol.py``).

    * Messages and tools pass through typed records: unknown members are lost, the known ones are in
      the record's order, and missing ones of tools and calls are null.
    * Texts of parts are joined by a space; templates that take parts get them with only type and
      text, except in tool results.
    * Arguments of an assistant's calls are objects; anything else is refused.
    * A conversation that ends with the assistant ends with the user instead.

    Args:
        parts: True if the template takes lists of content parts, as SGLang detected.
        defaults: template options that the server was started with.
    """

    parts: bool
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def asked(self, body: Mapping[str, Any]) -> Asked:
        """See :class:`Dialect`."""
        refuse(body, _SGLANG_STEERS)
        given = optional(body, "chat_template_kwargs", dict) or {}
        kwargs = {**self.defaults, **given}
        if not APPLIED.isdisjoint(kwargs):
            raise RenderError("an option of the chat template is none of the template's")
        tools = _chosen(optional(body, "tools", list) or [], body.get("tool_choice"))
        return Asked([_sglang_tool(tool) for tool in tools] or None, kwargs)

    def conversation(self, messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
        """See :class:`Dialect`."""
        if messages and str(messages[-1].get("role")).lower() == "assistant":
            content = self.message(messages[-1])["content"]
            if isinstance(content, str):
                return [*messages[:-1], {"role": "user", "content": content}]
        return messages

    def message(self, message: ChatMessage) -> ChatMessage:
        """See :class:`Dialect`."""
        if message.get("role") == "user":
            if message.get("content") is None:
                raise RenderError("a user's message has no content")
            return {"role": "user", "content": self._content(message, "user")}
        role = str(message.get("role")).lower()
        if role not in _SGLANG_ROLES or not isinstance(message["role"], str):
            raise RenderError("a message has an unknown role")
        shown: dict[str, Any] = {
            "role": role,
            "content": self._content(message, role),
            "tool_call_id": optional(message, "tool_call_id", str),
            "name": optional(message, "name", str),
            "phase": message.get("phase"),
            "reasoning_content": optional(message, "reasoning_content", str),
            "tool_calls": _each(message, "tool_calls", lambda call: _sglang_call(call, role)),
            "tools": _each(message, "tools", _sglang_tool),
            "prefix": optional(message, "prefix", bool),
        }
        if shown["phase"] not in _SGLANG_PHASES:
            raise RenderError("a message has an unknown phase")
        if self.parts and isinstance(message.get("content"), list):
            shown["content"] = shown.pop("content")  # it comes last there
        return {name: value for name, value in shown.items() if value is not None}

    def _content(self, message: ChatMessage, role: str) -> str | list[dict[str, str]]:
        content = message.get("content")
        if content is None or isinstance(content, str):
            return content or ""
        if not isinstance(content, list):
            raise RenderError("a content is neither text nor parts")
        texts = list(_sglang_texts(content, role))
        if self.parts and not (role == "tool" and len(texts) == len(content)):
            return [{"type": "text", "text": text} for text in texts]
        return " ".join(texts)


def refuse(body: Mapping[str, Any], members: Collection[str]) -> None:
    """Raise :class:`RenderError` if a request has one of the members."""
    for name in members:
        value = body.get(name)
        if value is not None and value is not False:  # 0.0 asks for something
            raise RenderError(f"{name} changes the prompt")


def optional(holder: Mapping[str, Any], name: str, kind: type[Any]) -> Any:
    """Return a member, or None if it is missing or null."""
    value = holder.get(name)
    # Require the exact type: a record would convert others.
    if value is not None and type(value) is not kind:
        raise RenderError(f"{name} is no {kind.__name__}")
    return value


def required(holder: object, name: str, kind: type[Any]) -> Any:
    """Return a member that must be there."""
    value = optional(holder, name, kind) if isinstance(holder, Mapping) else None
    if value is None:
        raise RenderError(f"{name} is missing")
    return value


def _is_text(part: object) -> bool:
    member = TEXT_PARTS.get(str(part.get("type"))) if isinstance(part, Mapping) else None
    return isinstance(part, Mapping) and member is not None and isinstance(part.get(member), str)


def _each(holder: Mapping[str, Any], name: str, shown: Callable[[Any], Any]) -> list[Any] | None:
    items = optional(holder, name, list)
    return None if items is None else [shown(item) for item in items]


def _sglang_texts(parts: Sequence[Any], role: str) -> Iterator[str]:
    for part in parts:
        match part:
            case {"type": "text", "text": str(text)}:
                yield text
            case {"type": "thinking" | "reasoning"} if role == "assistant":
                continue  # left out for all templates
            case _:
                raise RenderError("a content has parts that are no text")


def _sglang_call(call: object, role: str) -> dict[str, Any]:
    function = required(call, "function", dict)
    assert isinstance(call, Mapping)  # noqa: S101 - it has a member
    if call.get("type", "function") != "function":
        raise RenderError("a tool call is no function's")
    arguments = function.get("arguments")
    if role == "assistant" and isinstance(arguments, str):
        arguments = _object(arguments)
    elif arguments is not None and not isinstance(arguments, str | dict):
        raise RenderError("a tool call's arguments are no object")
    return {
        "id": optional(call, "id", str),
        "index": optional(call, "index", int),
        "type": "function",
        "function": {"name": optional(function, "name", str), "arguments": arguments},
    }


def _object(text: str) -> dict[str, Any]:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise RenderError("a tool call's arguments are no JSON") from error
    if not isinstance(value, dict):
        raise RenderError("a tool call's arguments are no object")
    return value


def _sglang_tool(tool: object) -> dict[str, Any]:
    function = required(tool, "function", dict)
    assert isinstance(tool, Mapping)  # noqa: S101 - it has a member
    deferred = optional(tool, "defer_loading", bool)
    rest = {
        "strict": optional(function, "strict", bool),
        "defer_loading": _first(optional(function, "defer_loading", bool), deferred),
    }
    parameters = function.get("parameters")
    if not _is_standard(parameters):
        raise RenderError("a tool's schema has types that are none of JSON Schema's")
    shown = {
        "description": optional(function, "description", str),
        "name": required(function, "name", str),
        "parameters": parameters,
    } | {name: value for name, value in rest.items() if value is not None}
    order = dict.fromkeys((*function, *shown))
    if type(tool.get("type", "function")) is not str:
        raise RenderError("a tool's type is no text")
    return {
        "type": tool.get("type", "function"),
        "function": {name: shown[name] for name in order if name in shown},
        "defer_loading": deferred,
    }


def _first(one: Any, other: Any) -> Any:
    return other if one is None else one


def _chosen(tools: Sequence[Any], choice: object) -> Sequence[Any]:
    match choice:
        case None | "auto" | "required":
            return tools
        case "none":
            return []
        case {"function": {"name": str(name)}}:
            return [tool for tool in tools if required(tool, "function", dict).get("name") == name]
    raise RenderError("tool_choice is none that is known")


def _is_standard(schema: object) -> bool:
    """Return True if every type in a schema is one of JSON Schema's; SGLang rewrites others."""
    if isinstance(schema, list):
        return all(map(_is_standard, schema))
    if not isinstance(schema, dict):
        return True
    kind = schema.get("type")
    kinds = kind if isinstance(kind, list) else [kind] if isinstance(kind, str) else []
    known = all(isinstance(item, str) and item in _SCHEMA_TYPES for item in kinds)
    return known and len({*kinds}) == len(kinds) and all(map(_is_standard, schema.values()))
