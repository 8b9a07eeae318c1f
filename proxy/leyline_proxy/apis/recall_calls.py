"""Calls of the recall tool in chat answers: read, and taken out of what clients get. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..model.asides import RECALL_TOOL
from .chat_answers import arguments_text, call_parts, content_of, first_choice, reasoning_of
from .streamed_calls import StreamedCalls

_CALLS = ("tool_calls", "function_call")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of the recall tool."""

    id: str
    arguments: str
    place: int
    """Place among the calls of its message."""


@dataclass(frozen=True, slots=True)
class RecallAsked:
    """An answer with calls of the recall tool."""

    calls: tuple[ToolCall, ...]
    text: str = field(default="", repr=False)
    reasoning: str = field(default="", repr=False)
    own: tuple[str, ...] = ()
    """Ids of the calls of the client's tools."""


def asked_in(answer: Mapping[str, Any]) -> RecallAsked | None:
    """Return the calls of the recall tool in a whole answer; None if it has none."""
    said = _message(answer)
    made = _calls(said)
    calls = tuple(
        ToolCall(str(call.get("id") or ""), _arguments(call), place)
        for place, call in enumerate(made)
        if _name(call) == RECALL_TOOL
    )
    if not calls:
        return None
    text, reasoning = content_of(said), reasoning_of(said)
    own = tuple(str(call.get("id") or "") for call in made if _name(call) != RECALL_TOOL)
    return RecallAsked(calls, text, reasoning, own)


def without_calls(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return a whole answer without calls of the recall tool; one without others is complete."""
    said, choice = _message(answer), first_choice(answer) or {}
    kept = [call for call in _calls(said) if _name(call) != RECALL_TOOL]
    message = {name: value for name, value in said.items() if name not in _CALLS or kept}
    if kept:
        message["tool_calls"] = kept
    shown = {**choice, "message": message}
    if not kept and choice.get("finish_reason") == "tool_calls":
        shown["finish_reason"] = "stop"
        message["content"] = message.get("content") or ""
    return {**answer, "choices": [shown]}


def with_start(answer: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Return a whole answer with a text in front of its own."""
    if not text:
        return {**answer}
    said, choice = _message(answer), first_choice(answer) or {}
    content = said.get("content")
    if isinstance(content, list):
        content = [{"type": "text", "text": text}, *content]
    else:
        content = text + content_of(said)
    return {**answer, "choices": [{**choice, "message": {**said, "content": content}}]}


class RecallScreen:
    """Takes calls of the recall tool out of a streamed answer.

    The client's own calls keep their order and are numbered without the others.
    """

    def __init__(self) -> None:
        self._own: dict[int, int] = {}
        """The client's numbers of its calls, by those among all."""
        self._calls = StreamedCalls()
        self._held: dict[int, list[Mapping[str, Any]]] = {}
        """Parts of calls whose name may still become the tool's."""
        self._arguments: dict[int, list[str]] = {}
        self._text: list[str] = []
        self._reasoning: list[str] = []

    def feed(self, delta: Mapping[str, Any], *, last: bool = False) -> Mapping[str, Any] | None:
        """Return the part of a delta that the client gets; None if nothing is left of it.

        Args:
            last: True for the delta that ends the answer.
        """
        self._text.append(content_of(delta))
        self._reasoning.append(reasoning_of(delta))
        calls = call_parts(delta)
        shown = [kept for call in calls for kept in self._shown(call)]
        if last:
            shown += [kept for number in [*self._held] for kept in self._released(number)]
        if shown == calls:
            return delta
        rest = {name: value for name, value in delta.items() if name not in _CALLS}
        if shown:
            rest["tool_calls"] = shown
        return rest if any(value for name, value in rest.items() if name != "role") else None

    def _shown(self, part: object) -> list[Any]:
        """Return the parts of calls that the client gets for one part."""
        taken = self._calls.take(part) if isinstance(part, Mapping) else None
        if taken is None or not isinstance(part, Mapping):
            return []
        call, arguments = taken
        number = call.number
        if number in self._own:
            return [self._numbered(part, number)]
        held = self._held.setdefault(number, [])
        held.append(part)
        if number in self._arguments or call.name == RECALL_TOOL:
            said = map(_arguments, held[:-1])
            # Other readers take null for no arguments; as in a whole answer, it is kept here.
            last = arguments if call.whole else _arguments(part)
            self._arguments.setdefault(number, []).extend([*said, last])
            del self._held[number]
        return self._decided()

    def _decided(self) -> list[Any]:
        """Return the held parts of the client's own calls; calls keep their order."""
        shown: list[Any] = []
        for number in sorted(self._held):
            call = self._calls.calls[number]
            # Others may split a name, or send it after the id or the arguments.
            if RECALL_TOOL.startswith(call.name) and not (call.begun and call.name):
                break
            shown += self._released(number)
        return shown

    def _released(self, number: int) -> list[Mapping[str, Any]]:
        """Return the parts so far of a call that is the client's own."""
        self._own.setdefault(number, len(self._own))
        return [self._numbered(call, number) for call in self._held.pop(number)]

    def _numbered(self, call: Mapping[str, Any], number: int) -> Mapping[str, Any]:
        own = self._own[number]
        return call if call.get("index", number) == own else {**call, "index": own}

    @property
    def asked(self) -> RecallAsked | None:
        """The calls so far; None if there are none."""
        if not self._arguments:
            return None
        ids = [call.id or "" for call in self._calls.calls]
        calls = tuple(
            ToolCall(ids[number], "".join(self._arguments[number]), number)
            for number in sorted(self._arguments)
        )
        text, reasoning = "".join(self._text), "".join(self._reasoning)
        own = tuple(ids[number] for number in sorted(self._own))
        return RecallAsked(calls, text, reasoning, own)


def _message(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    said = (first_choice(answer) or {}).get("message")
    return said if isinstance(said, Mapping) else {}


def _calls(said: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [call for call in call_parts(said) if isinstance(call, Mapping)]


def _name(call: Mapping[str, Any]) -> str:
    function = call.get("function")
    return str(function.get("name") or "") if isinstance(function, Mapping) else ""


def _arguments(call: Mapping[str, Any]) -> str:
    function = call.get("function")
    return arguments_text(function.get("arguments")) if isinstance(function, Mapping) else ""
