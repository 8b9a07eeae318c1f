"""Chat messages: identity, text, and validity."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import xxhash

from leyline_engine.contract import TEXT_PARTS
from leyline_policies.verbs import ANNOTATION

Message = dict[str, Any]
"""An OpenAI chat message as decoded JSON."""

VOLATILE_KEYS = frozenset({"cache_control", "prompt_cache_breakpoint"})
"""Cache markers that move from turn to turn; ignored in comparison, but sent."""

_NEVER_SENT_KEYS = frozenset({ANNOTATION})

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_OPAQUE_KEYS = frozenset({"arguments"})
"""Members that hold the caller's own data, compared without normalisation."""

_WORDS = frozenset({*TEXT_PARTS, "thinking", "redacted_thinking", "reasoning"})
"""Types of content parts that are words, or are never shown to a model."""

_TEXT_KEYS = frozenset({"role", "content", "tool_call_id"})

_CONTAINERS = (dict, list)

_encoder = msgspec.json.Encoder(order="sorted")


MAX_DEPTH = 128
"""Deepest nesting of lists and objects, including the message itself; no chat message has ten."""


class MessageError(ValueError):
    """A message list that no chat endpoint could accept; ``param`` names the field."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def fingerprint(message: Message) -> int:
    """Return the xxh3-64 of the message's canonical form.

    Volatile markers and null members don't matter, nor key order outside arguments, nor whether a
    text is a string or a single text part.
    """
    canonical = message if is_text_only(message) else _canonical_message(message)
    return int(xxhash.xxh3_64_intdigest(_encoder.encode(canonical)))


def is_text_only(message: Message) -> bool:
    """Return True if a message holds only texts, as most do; it is then in canonical form."""
    return (
        message.keys() <= _TEXT_KEYS
        and isinstance(message.get("content"), str)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("tool_call_id", ""), str)
    )


def has_media(messages: Iterable[Message]) -> bool:
    """Return True if a content has a picture, a sound, a file or another part that is no text."""
    contents = (message.get("content") for message in messages)
    return any(isinstance(content, list) and any(map(_is_media, content)) for content in contents)


def _is_media(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") not in _WORDS


def _canonical_message(message: Message) -> dict[str, Any]:
    canonical = {
        key: _canonical(value) if isinstance(value, _CONTAINERS) else value
        for key, value in message.items()
        if value is not None and key not in VOLATILE_KEYS and key not in _NEVER_SENT_KEYS
    }
    content = canonical.get("content")
    if isinstance(content, list) and len(content) == 1:
        part = content[0]
        if isinstance(part, dict) and part.keys() == {"type", "text"} and part["type"] == "text":
            canonical["content"] = part["text"]
    return canonical


def _canonical(value: Any) -> Any:
    """Return the canonical form of a list or an object."""
    if isinstance(value, list):
        return [_canonical(item) if isinstance(item, _CONTAINERS) else item for item in value]
    return {
        key: _canonical_member(key, item) if isinstance(item, _CONTAINERS) else item
        for key, item in value.items()
        if item is not None and key not in VOLATILE_KEYS
    }


def _canonical_member(key: str, value: Any) -> Any:
    """Return the canonical form of an object's member; templates show the caller's own data in its
    order."""
    return [msgspec.json.encode(value).decode()] if key in _OPAQUE_KEYS else _canonical(value)


def text_of(message: Message) -> str:
    """Return the message's text: its string content, or its text parts joined."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(part["text"] for part in content if is_text_part(part))
    return ""


def is_text_part(part: object) -> bool:
    """Return True if a content part carries text."""
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def call_ids(message: Message) -> tuple[str, ...]:
    """Return the ids of the tool calls that a message makes."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return ()
    return tuple(
        call["id"] for call in calls if isinstance(call, dict) and isinstance(call.get("id"), str)
    )


def check_messages(messages: object, known: int = 0) -> list[Message]:
    """Return the message list, with the checks that every chat endpoint would make.

    Unknown members, part types and names pass. So do results without a text, and results whose call
    isn't in the list: engines render them as they are.

    Args:
        known: number of leading messages already checked.

    Raises:
        MessageError: names the first offending field and the expected value.
    """
    if not isinstance(messages, list):
        raise MessageError("messages", "messages must be a list of chat messages.")
    if not messages:
        raise MessageError("messages", "messages must hold at least one message.")
    for index, message in enumerate(messages[known:], known):
        check_message(index, message)
    return messages


def check_message(index: int, message: object) -> None:
    """Check one message of the list, as :func:`check_messages` would.

    Raises:
        MessageError: names the first offending field and the expected value.
    """
    if not isinstance(message, dict):
        where = f"messages[{index}]"
        raise MessageError(where, f"{where} must be an object with role and content.")
    if not is_text_only(message):
        _check_depth(index, message)
    role = message.get("role")
    if role not in ROLES:
        where = f"messages[{index}].role"
        raise MessageError(where, f"{where} must be one of {', '.join(ROLES)}.")
    if not isinstance(message.get("content"), str):
        _check_content(f"messages[{index}].content", role, message)
    if role == "assistant" and "tool_calls" in message:
        _check_calls(f"messages[{index}].tool_calls", message["tool_calls"])
    if role == "tool" and not isinstance(message.get("tool_call_id"), str | None):
        where = f"messages[{index}].tool_call_id"
        raise MessageError(where, f"{where} must be the id of a tool call, as a string.")


def _check_depth(index: int, message: Message) -> None:
    """Check the depth level by level, because later code (templates, policies, copies) recurses."""
    level: list[Any] = [value for value in message.values() if isinstance(value, _CONTAINERS)]
    for _ in range(MAX_DEPTH - 1):
        if not level:
            return
        level = [
            item
            for value in level
            for item in (value.values() if isinstance(value, dict) else value)
            if isinstance(item, _CONTAINERS)
        ]
    if level:
        where = f"messages[{index}]"
        raise MessageError(where, f"{where} is nested deeper than {MAX_DEPTH} levels.")


def _check_content(field: str, role: str, message: Mapping[str, Any]) -> None:
    """Check a content that isn't a string."""
    content = message.get("content")
    if content is None:
        # Assistants may only call tools, and tools may return nothing.
        if role in ("assistant", "function", "tool"):
            return
        raise MessageError(field, f"{field} is missing; a {role} message needs a text or parts.")
    if not isinstance(content, list):
        raise MessageError(field, f"{field} must be a string or a list of content parts.")
    for number, part in enumerate(content):
        place = f"{field}[{number}]"
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise MessageError(place, f"{place} must be a content part: an object with a type.")
        if part["type"] == "text" and not isinstance(part.get("text"), str):
            raise MessageError(f"{place}.text", f"{place}.text must be a string.")
        _check_unannotated(place, part)


def _check_unannotated(place: str, item: Mapping[str, Any]) -> None:
    """Refuse an annotation on a part of a message: it would have no effect."""
    if ANNOTATION in item:
        where = f"{place}.{ANNOTATION}"
        raise MessageError(where, f"{where}: only a message as a whole may have this member.")


def _check_calls(field: str, calls: object) -> None:
    if calls is None:
        return
    if not isinstance(calls, list):
        raise MessageError(field, f"{field} must be a list of tool calls.")
    for number, call in enumerate(calls):
        place = f"{field}[{number}]"
        if not isinstance(call, dict):
            raise MessageError(place, f"{place} must be an object with id, type and function.")
        if not isinstance(call.get("id"), str):
            raise MessageError(f"{place}.id", f"{place}.id must be a string; results refer to it.")
        _check_unannotated(place, call)
        function = call.get("function")
        if function is not None and not (
            isinstance(function, dict) and isinstance(function.get("name"), str)
        ):
            place = f"{place}.function"
            raise MessageError(place, f"{place} must be an object with a name and arguments.")
