"""The policy by which the agent's own model names results that it no longer needs."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, ClassVar

from leyline_policies.builtin.notes import with_note
from leyline_policies.builtin.tool_results import called_tools, result_stub, with_edited
from leyline_policies.context import Context
from leyline_policies.policy import Message, Mode

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "prune_context",
        "description": (
            "Drop tool results that you need no more from your context. Each result ends with its "
            "number. Call it when outputs are obsolete or were only steps to an answer you have."
        ),
        "parameters": {
            "type": "object",
            "properties": {
                "results": {
                    "type": "array",
                    "items": {"type": "integer", "minimum": 1},
                    "description": "Numbers of the results to drop.",
                }
            },
            "required": ["results"],
        },
    },
}
"""The tool to offer the model; the harness answers its calls with any text, such as ``ok``."""

_MAX_NAMED = 1_000


@dataclass(frozen=True, slots=True)
class ModelPrune:
    """Clear the tool results that the model names by calling ``tool``.

    Every result ends with its number, as a line ``[result N]``, so that the model can name it; with
    ``label=false`` the harness numbers them itself, from 1. A call of ``tool`` with
    ``{"results": [N, …]}`` clears those results from the next turn on; results of ``tool`` itself
    and of ``exclude_tools`` stay. The harness offers the tool to its model
    (`leyline_policies.builtin.model_prune.TOOL`) and answers its calls. The idea is that of
    opencode's dynamic context pruning.
    """

    name: ClassVar[str] = "model_prune"
    mode: ClassVar[Mode] = "amortize"
    trusted: ClassVar[bool] = True

    tool: str = "prune_context"
    label: bool = True
    exclude_tools: tuple[str, ...] = ()
    placeholder: str = "[dropped at the model's own request]"

    def transform(self, messages: list[Message], turn_idx: int, context: Context) -> list[Message]:
        """Return the messages with results numbered, and the named ones cleared."""
        results = context.results(messages)
        if not results:
            return messages
        tools = called_tools(messages, context)
        own: set[int] = set()
        if self.tool in tools.values():
            own = {index for index in results if tools.get(index) == self.tool}
        named = {results[number - 1] for number in self._named(messages, results, context)}
        gone = [i for i in sorted(named - own) if tools.get(i) not in self.exclude_tools]
        edited = messages
        if self.label:
            numbers = [*context.fold(results, _count, list[int], key="numbers")]
            numbers += [0] * (len(messages) - len(numbers))
            numbered = context.each(messages, _numbered, "numbered", told=numbers)
            places = [i for i in results if i not in own] if own else results
            edited = with_edited(edited, numbered, places)
        return (
            with_edited(edited, context.each(messages, self._cleared, "cleared"), gone)
            if gone
            else edited
        )

    def _named(self, messages: list[Message], results: Sequence[int], context: Context) -> set[int]:
        """Return the numbers that calls of the tool name, of results before the call."""
        asked = context.each(messages, self._asked, "asked")
        return {
            number
            for index in context.where(messages, self._asked, "asked")
            for number in asked[index]
            if number <= bisect_left(results, index)
        }

    def _asked(self, message: Message) -> tuple[int, ...]:
        calls = message.get("tool_calls") or () if message.get("role") == "assistant" else ()
        bodies = (call.get("function") for call in calls if isinstance(call, dict))
        return tuple(
            number
            for body in bodies
            if isinstance(body, dict) and body.get("name") == self.tool
            for number in _numbers(body.get("arguments"))
        )

    def _cleared(self, message: Message) -> Message:
        return result_stub(message, self.placeholder, "named")


def _count(numbers: list[int], result: int) -> None:
    """Add one result: its number in its place, and 0 for all other messages since the last."""
    last = next((number for number in reversed(numbers) if number), 0)
    numbers += [*repeat(0, result - len(numbers)), last + 1]


def _numbered(message: Message, number: int) -> Message:
    """Return a result with its number; any other message, which has none, as it is."""
    return with_note(message, f"[result {number}]", cause="number") if number else message


def _numbers(arguments: Any) -> Iterable[int]:
    """Return the numbers in a call's arguments; none if they aren't what the tool takes."""
    try:
        asked = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return ()
    found = asked.get("results") if isinstance(asked, dict) else None
    if not isinstance(found, list):
        return ()
    return [number for number in found[:_MAX_NAMED] if type(number) is int and number > 0]
