"""Helpers for policies: reading OpenAI chat messages and editing them without changing them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from leyline_policies.marks import edit as mark_edited
from leyline_policies.policy import Message

RESULT_ROLES = frozenset({"tool", "function"})
BEARERS = frozenset({"user", *RESULT_ROLES})
"""Roles of messages that may bear a note or a stub: those that the model answers, never its own."""
INSTRUCTION_ROLES = frozenset({"system", "developer"})


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call and the places of its results; indices count messages.

    ``position`` is the call's place in the assistant message's ``tool_calls``, or None for the
    older ``function_call``. ``results`` is empty while the call is unanswered.
    """

    name: str
    message: int
    position: int | None
    results: tuple[int, ...]


def text_of(message: Message) -> str:
    """Return the message's text: a string content, or a list's text parts joined; else empty."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_part_text(part) for part in content)
    return ""


def map_text(message: Message, edit: Callable[[str], str]) -> Message:
    """Return a copy of ``message`` with ``edit`` applied to its string content or each text part.

    Other parts and all other keys stay. If no text changes, it is ``message`` itself.
    """
    content = message.get("content")
    edited: Any = content
    if isinstance(content, str):
        edited = edit(content)
    elif isinstance(content, list):
        edited = [_edit_part(part, edit) for part in content]
    return message if edited == content else mark_edited(message, content=edited)


Part = tuple[tuple[str, int | None, str], ...] | str | None
"""A message's part in calling tools: its calls (name, position, key), the key that it answers, or
nothing."""


def pair_calls(messages: Sequence[Message]) -> tuple[ToolCall, ...]:
    """Return every tool call in order, with the results that answer it.

    A result belongs to the latest call of its id before it, so ids may be used again.
    """
    return pair_parts([part_of(message) for message in messages])


def part_of(message: Message) -> Part:
    """Return the message's part in calling tools."""
    role = message.get("role")
    if role == "assistant":
        return tuple(_calls_of(message)) or None
    return _result_key(message) if role in RESULT_ROLES else None


def pair_parts(parts: Sequence[Part]) -> tuple[ToolCall, ...]:
    """Return `pair_calls` for messages of which the parts are known."""
    return CallPairs().through(parts)


class CallPairs:
    """Calls with the results that answer them, of a conversation that grows."""

    def __init__(self) -> None:
        self._taken = 0
        self._found: list[tuple[str, int, int | None, list[int]]] = []
        self._calls: list[ToolCall] = []
        self._touched: set[int] = set()  # calls of `_found` that `_calls` doesn't contain yet
        self._waiting: dict[str, list[int]] = {}  # the latest calls of an id

    def through(self, parts: Sequence[Part]) -> tuple[ToolCall, ...]:
        """Return the calls of all ``parts``, which begin with those of the last call."""
        for index in range(self._taken, len(parts)):
            part = parts[index]
            if isinstance(part, str):
                self._answer(part, index)
            elif part is not None:
                self._call(part, index)
        self._taken = len(parts)
        for number in sorted(self._touched):
            name, at, position, results = self._found[number]
            self._calls[number : number + 1] = [ToolCall(name, at, position, tuple(results))]
        self._touched.clear()
        return tuple(self._calls)

    def _call(self, part: Sequence[tuple[str, int | None, str]], index: int) -> None:
        fresh: dict[str, list[int]] = {}
        for name, position, key in part:
            fresh.setdefault(key, []).append(len(self._found))
            self._touched.add(len(self._found))
            self._found.append((name, index, position, []))
        self._waiting.update(fresh)

    def _answer(self, key: str, index: int) -> None:
        numbers = self._waiting.get(key)
        if numbers:
            number = next((each for each in numbers if not self._found[each][3]), numbers[-1])
            self._found[number][3].append(index)
            self._touched.add(number)


def with_partners(indices: Collection[int], calls: Sequence[ToolCall]) -> set[int]:
    """Return ``indices`` with all that must stay with them.

    Those are a call and its results, and the calls of one message.
    """
    found = set(indices)
    for call in calls:
        if not found.isdisjoint(call.results):
            found.add(call.message)
    for call in calls:
        if call.message in found:
            found.update(call.results)
    return found


def instructions_end(messages: Sequence[Message]) -> int:
    """Return where the instructions at the front end."""
    return next(
        (i for i, message in enumerate(messages) if message.get("role") not in INSTRUCTION_ROLES),
        len(messages),
    )


def is_user(message: Message) -> bool:
    """Return True if the message is the user's."""
    return message.get("role") == "user"


def nth_last(messages: Sequence[Message], role: str, n: int) -> int | None:
    """Return the place of the ``n``-th message of ``role`` from the end; None with fewer."""
    for index in range(len(messages) - 1, -1, -1):
        if messages[index].get("role") == role:
            n -= 1
            if n <= 0:
                return index
    return None


def tool_uses_in(messages: Sequence[Message]) -> int:
    """Return the number of tool calls in all messages."""
    return sum(
        len(message.get("tool_calls") or ()) + bool(message.get("function_call"))
        for message in messages
        if message.get("role") == "assistant"
    )


def tags_of(message: Message) -> tuple[str, ...]:
    """Return the tags of a message: its member ``tags``, or ``leyline.tags``."""
    own = message.get("tags")
    noted = message.get("leyline")
    if isinstance(noted, dict) and isinstance(noted.get("tags"), list):
        own = [*(own if isinstance(own, list) else ()), *noted["tags"]]
    return tuple(tag for tag in own if isinstance(tag, str)) if isinstance(own, list) else ()


def _calls_of(message: Message) -> Iterator[tuple[str, int | None, str]]:
    """Yield name, position and pairing key of each call in an assistant message."""
    for position, call in enumerate(message.get("tool_calls") or ()):
        if isinstance(call, dict):
            body = call.get("function") or call.get("custom") or {}
            yield str(body.get("name") or ""), position, f"id:{call.get('id')}"
    function = message.get("function_call")
    if isinstance(function, dict):
        name = str(function.get("name") or "")
        yield name, None, f"function:{name}"


def _result_key(message: Message) -> str:
    if message["role"] == "function":
        return f"function:{message.get('name') or ''}"
    return f"id:{message.get('tool_call_id')}"


def _part_text(part: object) -> str:
    if isinstance(part, dict):
        part = part.get("text")
    return part if isinstance(part, str) else ""


def _edit_part(part: Any, edit: Callable[[str], str]) -> Any:
    if isinstance(part, str):
        return edit(part)
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return {**part, "text": edit(part["text"])}
    return part
