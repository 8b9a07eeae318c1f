"""The policy that keeps one result of calls that are the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from leyline_policies.builtin.arguments import canonical_arguments
from leyline_policies.builtin.tool_results import with_edited
from leyline_policies.context import Context
from leyline_policies.conversation import ToolCall
from leyline_policies.marks import edit
from leyline_policies.policy import Message, Mode

# What changes something, or is a record of its own, isn't the same when it is done again.
_EXCLUDED = (
    "task",
    "skill",
    "todowrite",
    "todoread",
    "compress",
    "batch",
    "plan_enter",
    "plan_exit",
    "write",
    "edit",
)


@dataclass(frozen=True, slots=True)
class DeduplicateCalls:
    """Of calls with the same tool and arguments keep only the newest result whole.

    The older results become ``placeholder``; the calls stay. Arguments are the same when they are
    as JSON, whatever the order of keys; null counts as absent. Calls of the tools in
    ``exclude_tools`` are left alone, and a call without a result yet replaces none.

    Rule and excluded tools are those of opencode's Dynamic Context Pruning
    (``lib/strategies/deduplication.ts``).
    """

    name: ClassVar[str] = "deduplicate_calls"
    mode: ClassVar[Mode] = "amortize"
    trusted: ClassVar[bool] = True

    exclude_tools: tuple[str, ...] = _EXCLUDED
    placeholder: str = "[same call made again later; result removed]"

    def transform(self, messages: list[Message], turn_idx: int, context: Context) -> list[Message]:
        """Return the messages with the older results replaced."""
        newest: dict[tuple[str, str], ToolCall] = {}
        older: list[int] = []
        each_asked = context.each(messages, canonical_arguments, "asked")
        for call in context.calls(messages):
            if not call.results or call.name in self.exclude_tools:
                continue
            key = call.name, each_asked[call.message][call.position]
            before = newest.get(key)
            if before is not None:
                older += before.results
            newest[key] = call
        if not older:
            return messages
        stubs = context.each(messages, self._stub, "stub")
        return with_edited(messages, stubs, older)

    def _stub(self, message: Message) -> Message:
        if message.get("content") == self.placeholder:
            return message
        return edit(message, stub=self.placeholder, cause="duplicate")
