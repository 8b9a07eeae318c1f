"""The policy that keeps one result of identical calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from leyline_policies.builtin.arguments import canonical_arguments
from leyline_policies.builtin.old_results import ClearedResults
from leyline_policies.context import Context
from leyline_policies.conversation import ToolCall
from leyline_policies.policy import Message

# A call that changes something, or is a record of its own, isn't the same when it is repeated.
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


@dataclass(slots=True)
class _Seen:
    """The newest call of each tool with the same arguments, and the results of older ones."""

    newest: dict[tuple[str, str], ToolCall] = field(default_factory=dict)
    older: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class DeduplicateCalls(ClearedResults):
    """Keep whole only the newest result of calls with the same tool and arguments.

    The older results become ``placeholder``; the calls stay. Arguments are the same when they are
    as JSON, whatever the order of keys; null counts as absent. Calls of the tools in
    ``exclude_tools`` are left alone, and a call without a result yet replaces none.

    Rule and excluded tools are those of opencode's Dynamic Context Pruning
    (``lib/strategies/deduplication.ts``).
    """

    name: ClassVar[str] = "deduplicate_calls"
    cause: ClassVar[str | None] = "duplicate"

    exclude_tools: tuple[str, ...] = _EXCLUDED
    placeholder: str = "[same call made again later; result removed]"

    def _places(self, messages: list[Message], context: Context) -> Sequence[int]:
        asked = context.each(messages, canonical_arguments, "asked")

        def see(seen: _Seen, call: ToolCall) -> None:
            if call.results and call.name not in self.exclude_tools:
                key = call.name, asked[call.message][call.position]
                before = seen.newest.get(key)
                if before is not None:
                    seen.older += before.results
                seen.newest[key] = call

        return context.fold(context.calls(messages), see, _Seen, asked).older
