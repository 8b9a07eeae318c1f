"""Common parts of the policies on tool results: their places, their tools, edits of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import is_not

from leyline_policies.context import Context
from leyline_policies.conversation import RESULT_ROLES, ToolCall
from leyline_policies.marks import edit
from leyline_policies.policy import Message

_NAMES = "tool_results.names"


def tool_names(messages: list[Message], context: Context) -> Mapping[int, str]:
    """Return the tool of each result, by index: that of the latest call of its id before it.

    A result without a call is known by its own name, if it has one; else the name is empty.
    """
    called = called_tools(messages, context)
    results = context.results(messages)
    if len(called) == len(results):
        return called
    return {i: called.get(i, str(messages[i].get("name") or "")) for i in results}


def called_tools(messages: list[Message], context: Context) -> Mapping[int, str]:
    """Return the tool of each result that answers a call, by index; not to be changed."""
    return context.fold(context.calls(messages), _note_results, dict[int, str], key=_NAMES)


def result_stub(message: Message, stub: str, cause: str | None = None) -> Message:
    """Return a tool result with ``stub`` for its content; unchanged if it has that already.

    Any other message stays as well, so that a policy may pass all of them to `Context.each`.
    """
    if message.get("role") not in RESULT_ROLES or message.get("content") == stub:
        return message
    return edit(message, stub=stub, cause=cause)


def first_answer(messages: Sequence[Message]) -> int:
    """Return the first assistant message's place, after instructions, examples and the task."""
    return next(
        (i for i, message in enumerate(messages) if message.get("role") == "assistant"),
        len(messages),
    )


def with_edits(messages: list[Message], edits: Mapping[int, Message]) -> list[Message]:
    """Return the messages with ``edits`` in their places; the same list if none differs."""
    return with_edited(messages, edits, edits)


def with_edited(
    messages: list[Message],
    edited: Sequence[Message] | Mapping[int, Message],
    places: Iterable[int],
) -> list[Message]:
    """Return the messages with those of ``edited`` at ``places``; the same list if none differs."""
    result = list(messages)
    for index in places:
        result[index] = edited[index]
    return result if any(map(is_not, result, messages)) else messages


def check_numbers(least: int, **numbers: float | None) -> None:
    """Raise ValueError for a number below ``least``, with its key."""
    for key, value in numbers.items():
        if value is not None and value < least:
            raise ValueError(f"{key}={value} is too small; it must be {least} or more")


def check_tools(key: str, tools: Collection[str] | None) -> None:
    """Raise ValueError for an empty list, since leaving it out means all tools."""
    if tools is not None and not tools:
        raise ValueError(f"{key}=[] names no tool; leave it out for the results of all")


def _note_results(named: dict[int, str], call: ToolCall) -> None:
    named.update(dict.fromkeys(call.results, call.name))
