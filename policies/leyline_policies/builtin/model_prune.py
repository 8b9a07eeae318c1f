"""The policy by which the agent's own model names what it needs no more."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from leyline_policies.builtin.notes import with_note
from leyline_policies.builtin.tool_results import with_edits
from leyline_policies.context import Context
from leyline_policies.marks import edit
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
        """Return the messages with results numbered, and those that were named cleared."""
        results = context.results(messages)
        if not results:
            return messages
        owners = {index: call for call in context.calls(messages) for index in call.results}
        named = self._named(messages, context)
        cleared = context.each(messages, self._cleared, "cleared")
        edits: dict[int, Message] = {}
        for number, index in enumerate(results, start=1):
            owner = owners.get(index)
            if owner is not None and owner.name == self.tool:
                continue
            spared = owner is not None and owner.name in self.exclude_tools
            if number in named and not spared:
                edits[index] = cleared[index]
            elif self.label:
                edits[index] = context.once(messages[index], _Numbered(number), number)
        return with_edits(messages, edits)

    def _named(self, messages: Sequence[Message], context: Context) -> set[int]:
        """The numbers that calls of the tool name, of results before the call."""
        named: set[int] = set()
        before = 0
        asked = context.each(messages, self._asked, "asked")
        results = frozenset(context.results(list(messages)))
        for index, numbers in enumerate(asked):
            before += index in results
            named.update(number for number in numbers if number <= before)
        return named

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
        if message.get("content") == self.placeholder:
            return message
        return edit(message, stub=self.placeholder, cause="named")


@dataclass(frozen=True, slots=True)
class _Numbered:
    """A result with its number."""

    number: int

    def __call__(self, message: Message) -> Message:
        return with_note(message, f"[result {self.number}]", cause="number")


def _numbers(arguments: Any) -> Iterable[int]:
    """The numbers in a call's arguments; none where they aren't what the tool takes."""
    try:
        asked = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return ()
    found = asked.get("results") if isinstance(asked, dict) else None
    if not isinstance(found, list):
        return ()
    return [number for number in found[:_MAX_NAMED] if type(number) is int and number > 0]
