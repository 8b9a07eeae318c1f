"""The policy that clears old tool results once the conversation is long."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from leyline_policies.builtin.old_results import of_tools
from leyline_policies.builtin.tool_results import check_numbers, result_stub, with_edits
from leyline_policies.context import Context
from leyline_policies.conversation import ToolCall, tool_uses_in
from leyline_policies.marks import edit
from leyline_policies.policy import Message, Mode

_NO_INPUT = "{}"


@dataclass(frozen=True, slots=True)
class ClearToolUses:
    """Replace all but the newest ``keep`` tool results by a placeholder once there is much text.

    It acts while the conversation has more than ``trigger_tokens`` tokens, or more than
    ``trigger_tool_uses`` tool calls; either may be None. Results of ``exclude_tools`` stay, and
    count among the newest. With ``clear_tool_inputs`` the arguments of the cleared calls become an
    empty object. If less than ``clear_at_least`` tokens would be removed, nothing is cleared; with
    ``stop_when_enough`` the oldest results are cleared only until so many tokens are gone.

    The rule is Anthropic's ``clear_tool_uses_20250919`` and, with ``stop_when_enough``, LangChain's
    ``ClearToolUsesEdit`` (langchain 1.5.2, agents/middleware/context_editing.py). Different from
    both: the cleared results are a function of the messages alone, so the same request gives the
    same prompt. Different from LangChain: a result belongs to the latest call of its id, not only
    to a call in the assistant message just before it, and a result whose call is gone is cleared.
    """

    name: ClassVar[str] = "clear_tool_uses"
    mode: ClassVar[Mode] = "amortize"
    trusted: ClassVar[bool] = True

    trigger_tokens: int | None = 100_000
    trigger_tool_uses: int | None = None
    keep: int = 3
    clear_at_least: int = 0
    clear_tool_inputs: bool = False
    exclude_tools: tuple[str, ...] = ()
    placeholder: str = "[cleared]"
    stop_when_enough: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for a negative number or a policy that would never act."""
        check_numbers(
            0,
            trigger_tokens=self.trigger_tokens,
            trigger_tool_uses=self.trigger_tool_uses,
            keep=self.keep,
            clear_at_least=self.clear_at_least,
        )
        if self.trigger_tokens is None and self.trigger_tool_uses is None:
            raise ValueError("trigger_tokens and trigger_tool_uses are both none; give one")
        if self.stop_when_enough and not self.clear_at_least:
            raise ValueError("stop_when_enough needs clear_at_least: how many tokens are enough")

    def transform(self, messages: list[Message], turn_idx: int, context: Context) -> list[Message]:
        """Return the messages with the older tool results cleared."""
        if not self._triggered(messages, context):
            return messages
        old = self._clearable(messages, context)
        if not self.clear_tool_inputs and not self.clear_at_least:
            return context.edited(messages, self._cleared, old)
        cleared = context.each(messages, self._cleared)
        owners = self._owners(messages, context) if old and self.clear_tool_inputs else {}
        edits: dict[int, Message] = {}
        inputs: dict[int, set[int | None]] = defaultdict(set)
        reclaimed = 0

        def put(index: int, edited: Message) -> int:
            """Put an edit, and return the tokens it reclaims beyond an earlier one."""
            before, edits[index] = edits.get(index, messages[index]), edited
            return context.tokens(before) - context.tokens(edited) if self.clear_at_least else 0

        def put_inputs(index: int) -> int:
            positions = frozenset(inputs[index])
            return put(index, _without_inputs(messages[index], positions, context))

        for index in old:
            reclaimed += put(index, cleared[index])
            call = owners.get(index)
            if call is not None:
                inputs[call.message].add(call.position)
            if not self.stop_when_enough:
                continue  # one edit of a message for all its calls
            if call is not None:
                reclaimed += put_inputs(call.message)
            if reclaimed >= self.clear_at_least:
                break
        if not self.stop_when_enough:
            reclaimed += sum(map(put_inputs, inputs))
        if reclaimed < self.clear_at_least and not self.stop_when_enough:
            return messages
        return with_edits(messages, edits)

    def _triggered(self, messages: list[Message], context: Context) -> bool:
        uses, tokens = self.trigger_tool_uses, self.trigger_tokens
        if uses is not None and tool_uses_in(messages) > uses:
            return True
        return tokens is not None and context.total(messages) > tokens

    def _clearable(self, messages: list[Message], context: Context) -> Sequence[int]:
        """Return the results to clear, oldest first."""
        found = context.results(messages)
        old = found[: max(0, len(found) - self.keep)]
        return of_tools(old, messages, context, exclude=self.exclude_tools)

    def _owners(self, messages: list[Message], context: Context) -> dict[int, ToolCall]:
        return {index: call for call in context.calls(messages) for index in call.results}

    def _cleared(self, message: Message) -> Message:
        return result_stub(message, self.placeholder)


def _without_inputs(
    message: Message, positions: frozenset[int | None], context: Context
) -> Message:
    """Return the assistant message with empty arguments in the calls at ``positions``."""

    def compute(message: Message) -> Message:
        members: dict[str, Any] = {}
        if None in positions:
            members["function_call"] = _emptied(message["function_call"])
        calls = message.get("tool_calls")
        if calls and positions - {None}:
            members["tool_calls"] = list(_emptied_calls(calls, positions))
        same = all(message.get(key) == value for key, value in members.items())
        return message if same else edit(message, **members)

    return context.once(message, compute, ("inputs", positions))


def _emptied_calls(calls: Iterable[Any], positions: frozenset[int | None]) -> Iterable[Any]:
    for position, call in enumerate(calls):
        if position not in positions:
            yield call
        elif isinstance(call.get("custom"), dict):
            yield {**call, "custom": {**call["custom"], "input": ""}}
        else:
            yield {**call, "function": _emptied(call.get("function"))}


def _emptied(function: Any) -> Any:
    return {**function, "arguments": _NO_INPUT} if isinstance(function, dict) else function
