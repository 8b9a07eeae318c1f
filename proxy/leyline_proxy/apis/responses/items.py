"""Map input items to chat messages.

The items of one answer (reasoning, message, calls) are one message of the assistant, as for the
engine. The response in an item's id identifies its answer; without such ids, the items' order does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from leyline_policies.verbs import ANNOTATION

from ...model.messages import Message
from ...request.annotations import said_by_both
from .calls import chat_call
from .content import Item, joined_content, said_text, shown_content, string
from .errors import FieldError
from .ids import answer_of
from .reasoning import reasoning_text

INSTRUCTIONS = "instructions"

_CALLS = ("function_call", "custom_tool_call", "local_shell_call")
_RESULTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")
_LEFT_OUT = frozenset({"web_search_call", "tool_search_call", "tool_search_output"})
"""Items for work of OpenAI's servers in an earlier answer. The proxy can't know its results."""

COMPACTION = "compaction"
"""Type of an item with a summary; opened, it holds the messages that stand for those before it."""

TOOLS_ITEM = "additional_tools"
"""Type of an item that is no message: its tools are offered with the others."""

_ROLES = {"user": "user", "system": "system", "developer": "system"}
"""Chat templates of open models have no role ``developer``."""


@dataclass(frozen=True, slots=True)
class Placed:
    """An item or a chat message, and its source field in the request."""

    value: Mapping[str, Any]
    origin: str


@dataclass(slots=True)
class _Answer:
    """The items of one answer read so far."""

    origin: str
    owner: str | None = None
    texts: list[str] = field(default_factory=list)
    thinking: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    note: dict[str, Any] = field(default_factory=dict)
    said: bool = False
    """True if a message was among them."""

    def ends_before(self, kind: str, owner: str | None) -> bool:
        """Return True if an item belongs to the next answer."""
        if owner is not None and self.owner is not None:
            return owner != self.owner
        if kind == "reasoning":
            return self.said
        return kind == "message" and self.said

    @property
    def empty(self) -> bool:
        return not (self.said or self.calls or any(self.thinking))

    def message(self) -> Message:
        text = "".join(self.texts)
        message: Message = {**self.note, "role": "assistant"}
        message["content"] = text or (None if self.calls else "")
        if any(self.thinking):
            message["reasoning_content"] = "".join(self.thinking)
        if self.calls:
            message["tool_calls"] = self.calls
        return message


def conversation(instructions: object, items: Iterable[Placed]) -> list[Placed]:
    """Return the chat messages of a request.

    Leading system messages become one, because many chat templates take only one.

    Raises:
        FieldError: a field is wrong; the error names it and what it should be.
    """
    placed = [*_instructed(instructions), *_messages(items)]
    opening = _opening(placed)
    if len(opening) < 2:
        return placed
    text = "\n\n".join(one.value["content"] for one in opening if one.value["content"])
    joined = Placed({"role": "system", "content": text}, opening[0].origin)
    return [joined, *placed[len(opening) :]]


def _opening(placed: Sequence[Placed]) -> list[Placed]:
    """Return the leading system messages that are texts without annotations."""
    found = []
    for one in placed:
        plain = one.value.keys() == {"role", "content"} and isinstance(one.value["content"], str)
        if one.value["role"] != "system" or not plain:
            break
        found.append(one)
    return found


def _instructed(instructions: object) -> Iterator[Placed]:
    if instructions is None:
        return
    if not isinstance(instructions, str):
        raise FieldError(INSTRUCTIONS, f"{INSTRUCTIONS} must be a string.")
    if instructions:
        yield Placed({"role": "system", "content": instructions}, INSTRUCTIONS)


def _messages(items: Iterable[Placed]) -> Iterator[Placed]:
    answer: _Answer | None = None
    called: set[str] = set()
    for item in items:
        kind = kind_of(item)
        if kind == TOOLS_ITEM or kind in _LEFT_OUT:
            continue
        if _is_answer(kind, item.value):
            owner = answer_of(item.value.get("id"))
            if answer is not None and answer.ends_before(kind, owner):
                yield from _closed(answer)
                answer = None
            answer = answer or _Answer(item.origin)
            _add(answer, kind, owner, item, called)
            continue
        if answer is not None:
            yield from _closed(answer)
            answer = None
        if kind == COMPACTION:
            yield from (Placed(each, item.origin) for each in item.value["messages"])
            continue
        yield _other(kind, item, called)
    if answer is not None:
        yield from _closed(answer)


def _closed(answer: _Answer) -> Iterator[Placed]:
    if not answer.empty:
        yield Placed(answer.message(), answer.origin)


def _is_answer(kind: str, item: Item) -> bool:
    spoken = kind == "message" and item.get("role") == "assistant"
    return spoken or kind == "reasoning" or kind in _CALLS


def _add(answer: _Answer, kind: str, owner: str | None, placed: Placed, called: set[str]) -> None:
    item = placed.value
    answer.owner = answer.owner or owner
    if ANNOTATION in item:
        said = item[ANNOTATION]
        if answer.note:
            said = said_by_both(answer.note[ANNOTATION], said)
        answer.note = {ANNOTATION: said}
    if kind == "reasoning":
        answer.thinking.append(reasoning_text(item))
    elif kind == "message":
        answer.said = True
        answer.texts.append(said_text(f"{placed.origin}.content", item.get("content")))
    else:
        call = chat_call(placed.origin, item)
        answer.calls.append(call)
        called.add(call["id"])


def _other(kind: str, placed: Placed, called: set[str]) -> Placed:
    """Return a message that isn't the assistant's."""
    item, place = placed.value, placed.origin
    note = {ANNOTATION: item[ANNOTATION]} if ANNOTATION in item else {}
    if kind == "message":
        role = item.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            known = ", ".join((*_ROLES, "assistant"))
            raise FieldError(f"{place}.role", f"{place}.role must be one of {known}.")
        # Templates show a system message's text, but not always its parts.
        shown = shown_content if role == "user" else joined_content
        content = shown(f"{place}.content", item.get("content"))
        return Placed({**note, "role": _ROLES[role], "content": content}, place)
    if kind in _RESULTS:
        name = "id" if kind == "local_shell_call_output" and "call_id" not in item else "call_id"
        call_id = string(place, item, name)
        if call_id not in called:
            field = f"{place}.{name}"
            raise FieldError(field, f"{field} must be the call_id of a call before it.")
        content = joined_content(f"{place}.output", item.get("output"))
        message = {**note, "role": "tool", "tool_call_id": call_id, "content": content}
        return Placed(message, place)
    raise FieldError(
        f"{place}.type",
        f"{place}.type: {kind[:80]!r} isn't taken here: only messages, reasoning, compactions, "
        "calls of functions, custom tools and the local shell, and their outputs.",
    )


def kind_of(placed: Placed) -> str:
    """Return the type of an item; a message may leave it out.

    Raises:
        FieldError: it is no item.
    """
    item, place = placed.value, placed.origin
    kind = item.get("type") if isinstance(item, dict) else None
    if isinstance(item, dict) and kind is None and "role" in item:
        return "message"
    if isinstance(item, dict) and kind is None and item.keys() <= {"id", "type"} and item:
        return "item_reference"
    if isinstance(kind, str):
        return kind
    raise FieldError(place, f"{place} must be an item: an object with a type.")
