"""Map input items to chat messages.

The items of one answer (reasoning, message, calls) are one message of the assistant, as for the
engine. The response in an item's id identifies its answer; without such ids, the items' order does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableSet, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from leyline_policies.verbs import ANNOTATION

from ...model.messages import Message
from ...request.annotations import said_by_both
from ..fields import FieldError
from ..foreign import UNKNOWN, Rule, Treatment, joined_texts, mapped, shown_text
from .calls import CALLS, RESULTS, chat_call, chat_result
from .content import Foreign, Item, joined_content, said_text, shown_content
from .ids import answer_of
from .reasoning import reasoning_text

_TEXT, _SKIPPED = Treatment.TEXT, Treatment.SKIPPED
_CALL, _RESULT = "a call", "a `tool` message"
_NO_RESULT = "OpenAI's servers ran it, and it holds no result"
_RAN = "what OpenAI's servers did, and what came of it"

ITEMS: Mapping[str, Rule] = MappingProxyType(
    {
        "message": mapped("a message"),
        "reasoning": mapped("`reasoning_content`"),
        "function_call": mapped(_CALL),
        "function_call_output": mapped(_RESULT),
        "custom_tool_call": mapped(_CALL),
        "custom_tool_call_output": mapped(_RESULT),
        "local_shell_call": mapped(_CALL),
        "local_shell_call_output": mapped(_RESULT),
        "shell_call": Rule(Treatment.MAPPED, "a call of `shell`"),
        "shell_call_output": Rule(Treatment.MAPPED, _RESULT),
        "apply_patch_call": Rule(Treatment.MAPPED, "a call of `apply_patch`"),
        "apply_patch_call_output": Rule(Treatment.MAPPED, _RESULT),
        "computer_call": Rule(Treatment.MAPPED, "a call of `computer`"),
        "computer_call_output": Rule(Treatment.MAPPED, f"{_RESULT} with the picture"),
        "additional_tools": mapped("tools"),
        "compaction": mapped("the messages in place of those before it"),
        "compaction_trigger": mapped("a request for a compaction"),
        "item_reference": mapped("the stored item; 404 if it isn't stored here"),
        "web_search_call": Rule(_SKIPPED, _NO_RESULT, native=True),
        "tool_search_call": Rule(_SKIPPED, _NO_RESULT, native=True),
        "tool_search_output": Rule(_SKIPPED, "agents offer these tools again", native=True),
        "file_search_call": Rule(_TEXT, _RAN),
        "code_interpreter_call": Rule(_TEXT, _RAN),
        "image_generation_call": Rule(
            _TEXT, "its prompt, without the picture", members=("revised_prompt", "error")
        ),
        "mcp_call": Rule(_TEXT, _RAN),
        "mcp_list_tools": Rule(_SKIPPED, "nobody here can call these tools"),
        "mcp_approval_request": Rule(_TEXT, "the call that waited for an approval"),
        "mcp_approval_response": Rule(_TEXT, "the user's decision, as a user message"),
        "program": Rule(_TEXT, "the code that OpenAI's servers ran"),
        "program_output": Rule(_TEXT, "its result"),
        "configuration_update": Rule(_SKIPPED, "the request's own options apply"),
    }
)
"""Rules by type, for every item that a request may hold."""

OF_USER = frozenset({"mcp_approval_response"})
"""Types of items that the user wrote, and that are shown as text."""


def rule_of(kind: str) -> Rule:
    """Return the rule for items of a type."""
    return ITEMS.get(kind, UNKNOWN)


def is_foreign(kind: str) -> bool:
    """Return True for items that have no form of their own in a chat request."""
    return rule_of(kind).treatment is not Treatment.MAPPED


INSTRUCTIONS = "instructions"


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
    texts: list[tuple[str, bool]] = field(default_factory=list)
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
        return not (self.said or self.calls or self.texts or any(self.thinking))

    def message(self) -> Message:
        text = joined_texts(self.texts)
        message: Message = {**self.note, "role": "assistant"}
        message["content"] = text or (None if self.calls else "")
        if any(self.thinking):
            message["reasoning_content"] = "".join(self.thinking)
        if self.calls:
            message["tool_calls"] = self.calls
        return message


def conversation(
    instructions: object, items: Sequence[Placed], foreign: MutableSet[str]
) -> list[Placed]:
    """Return the chat messages of a request.

    Leading system messages become one, because many chat templates take only one.

    Args:
        foreign: takes the types of what only another provider can read.

    Raises:
        FieldError: a field is wrong; the error names it and what it should be.
    """
    placed = [*_instructed(instructions), *_messages(items, foreign)]
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


def _messages(items: Sequence[Placed], foreign: MutableSet[str]) -> Iterator[Placed]:
    answer: _Answer | None = None
    asked = _first_unanswered(items)
    for index, item in enumerate(items):
        kind = kind_of(item)
        if not rule_of(kind).native:
            foreign.add(kind)
        if kind == TOOLS_ITEM or (is_foreign(kind) and not shown_text(item.value, rule_of(kind))):
            continue
        if _is_answer(kind, item.value):
            owner = answer_of(item.value.get("id"))
            if answer is not None and answer.ends_before(kind, owner):
                yield from _closed(answer)
                answer = None
            answer = answer or _Answer(item.origin)
            _add(answer, kind, owner, item, foreign)
            continue
        if answer is not None:
            yield from _closed(answer)
            answer = None
        if kind == COMPACTION:
            yield from (Placed(each, item.origin) for each in item.value["messages"])
            continue
        yield _other(kind, item, foreign if index < asked else None)
    if answer is not None:
        yield from _closed(answer)


def _closed(answer: _Answer) -> Iterator[Placed]:
    if not answer.empty:
        yield Placed(answer.message(), answer.origin)


def _is_answer(kind: str, item: Item) -> bool:
    if is_foreign(kind):
        return kind not in OF_USER and item.get("role") != "user"
    spoken = kind == "message" and item.get("role") == "assistant"
    return spoken or kind == "reasoning" or kind in CALLS


def _first_unanswered(items: Sequence[Placed]) -> int:
    """Return the index after the last answer's items."""
    for index in range(len(items) - 1, -1, -1):
        if _is_answer(kind_of(items[index]), items[index].value):
            return index + 1
    return 0


def _add(
    answer: _Answer, kind: str, owner: str | None, placed: Placed, foreign: MutableSet[str]
) -> None:
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
        text = said_text(f"{placed.origin}.content", item.get("content"), foreign)
        answer.texts.append((text, False))
    elif kind in CALLS:
        answer.calls.append(chat_call(placed.origin, item))
    else:
        answer.texts.append((shown_text(item, rule_of(kind)), True))


def _other(kind: str, placed: Placed, foreign: Foreign) -> Placed:
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
        content = shown(f"{place}.content", item.get("content"), foreign)
        return Placed({**note, "role": _ROLES[role], "content": content}, place)
    if kind in RESULTS:
        return Placed({**note, **chat_result(place, item, foreign)}, place)
    return Placed({**note, "role": "user", "content": shown_text(item, rule_of(kind))}, place)


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
