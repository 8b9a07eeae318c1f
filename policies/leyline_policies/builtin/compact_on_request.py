"""The policy by which the agent's own model says when its history may be compacted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol, runtime_checkable

from leyline_policies.builtin.inner import check_inner, run_all, trusts
from leyline_policies.builtin.notes import with_note
from leyline_policies.builtin.tool_results import check_numbers, with_edits
from leyline_policies.compose import whole_pairs
from leyline_policies.context import Context
from leyline_policies.conversation import ToolCall
from leyline_policies.faults import OnFault, strictest_on_fault
from leyline_policies.policy import Message, Mode, Policy

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "compact_context",
        "description": (
            "Compact the conversation history before your next turn, to free context for the work "
            "ahead. Call this when you have finished a phase of work, such as exploring a "
            "codebase, and the detail gathered so far is no longer needed verbatim. Older messages "
            "are condensed or dropped. Do not call it in the middle of a sub-task whose details "
            "you still need."
        ),
        "parameters": {
            "type": "object",
            "properties": {
                "focus": {
                    "type": "string",
                    "description": (
                        "What must survive the compaction, for example the plan and the paths you "
                        "will edit next."
                    ),
                }
            },
        },
    },
}
"""The tool to offer the model; the harness answers its calls with any text, such as ``ok``."""

_LONGEST_FOCUS = 2_000


@runtime_checkable
class SupportsFocus(Protocol):
    """A policy that can give weight to what must survive."""

    def with_focus(self, focus: str) -> Policy:
        """Return a policy that gives particular weight to ``focus``."""


@dataclass(frozen=True, slots=True)
class _Request:
    """A call of the tool, with its answer at ``result``; all before ``end`` had been said then."""

    call: ToolCall
    result: int
    end: int


@dataclass(frozen=True, slots=True)
class CompactOnRequest:
    """Let ``policies`` act on all that had been said when the model last called ``tool``.

    Size alone doesn't know where a task is; the model often does. The harness offers the tool to
    its model (`leyline_policies.builtin.compact_on_request.TOOL`) and answers its calls. From the
    next request on, the policies act, one after the other, on the messages up to that answer;
    newer messages stay whole until the next call. The policies' own triggers hold as well, so set
    them low. A ``focus`` that the model gives reaches the policies that can use one
    (``relevance``, ``summarize``). The messages alone determine what is compacted.

    A call is refused with fewer than ``min_tokens`` tokens since the last accepted one, and after
    ``max_requests``; the answer then ends with a note that says so.

    The tool and the rules are those of pydantic-ai-harness 0.62 (``CompactOnRequest``). Different
    from it: ``min_tokens`` counts what is new, not the whole history; and a compaction that
    another policy has made doesn't cancel a request.
    """

    name: ClassVar[str] = "compact_on_request"
    mode: ClassVar[Mode] = "amortize"

    policies: tuple[Policy, ...]
    tool: str = "compact_context"
    min_tokens: int | None = None
    max_requests: int | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for no policies, one that forgets, or a number out of range."""
        check_inner("policies", self.policies)
        check_numbers(1, min_tokens=self.min_tokens, max_requests=self.max_requests)

    @property
    def trusted(self) -> bool:
        """True if all of the policies are trusted."""
        return trusts(self.policies)

    @property
    def on_fault(self) -> OnFault | None:
        """The choice for all: if one of them fails, none of their edits is made."""
        return strictest_on_fault(self.policies)

    def transform(self, messages: list[Message], turn_idx: int, context: Context) -> list[Message]:
        """Return the messages with those before the last accepted request compacted."""
        accepted: _Request | None = None
        refused: dict[int, Message] = {}
        for request, why_not in self._judged(messages, context):
            if why_not:
                note = partial(with_note, note=f"[Not compacted: {why_not}]", cause="refused")
                noted = context.once(messages[request.result], note, why_not)
                refused[request.result] = noted
            else:
                accepted = request
        told = with_edits(messages, refused) if refused else messages
        if accepted is None:
            return told
        part = told[: accepted.end]
        policies = self._focused(_focus(messages, accepted.call))
        edited = run_all(policies, part, turn_idx, context.inner("compact"))
        return told if edited is part else [*edited, *told[accepted.end :]]

    def _judged(self, messages: list[Message], context: Context) -> Iterator[tuple[_Request, str]]:
        """Yield the requests, each with the reason why it is refused; empty if it isn't."""
        accepted = end = 0
        scheduled = -1
        for request in self._requests(messages, context):
            why_not = ""
            if self.max_requests is not None and accepted >= self.max_requests:
                why_not = f"the limit of {self.max_requests} compaction requests has been reached."
            elif request.call.message == scheduled:
                why_not = "a compaction is already scheduled before your next turn."
            elif self.min_tokens is not None:
                new = context.total(messages[end : request.end])
                if new < self.min_tokens:
                    why_not = (
                        f"the history has grown by about {new} tokens, less than the minimum of "
                        f"{self.min_tokens}, so compacting would save little."
                    )
            if not why_not:
                accepted, end, scheduled = accepted + 1, request.end, request.call.message
            yield request, why_not

    def _requests(self, messages: list[Message], context: Context) -> Iterator[_Request]:
        calls = context.calls(messages)
        asked = [call for call in calls if call.name == self.tool and call.results]
        if not asked:
            return
        last: dict[int, int] = {}
        pending: set[int] = set()
        for call in calls:
            last[call.message] = max(last.get(call.message, 0), *call.results, 0)
            pending |= set() if call.results else {call.message}
        for call in asked:
            end = whole_pairs(messages, last[call.message] + 1, calls)
            if end > call.message and call.message not in pending:
                yield _Request(call, call.results[-1], end)

    def _focused(self, focus: str) -> tuple[Policy, ...]:
        if not focus:
            return self.policies
        return tuple(
            policy.with_focus(focus) if isinstance(policy, SupportsFocus) else policy
            for policy in self.policies
        )


def _focus(messages: list[Message], call: ToolCall) -> str:
    """Return what a call asks to keep; empty if it says nothing that can be read."""
    calls = messages[call.message].get("tool_calls") or ()
    if call.position is None or call.position >= len(calls):
        return ""
    try:
        asked = json.loads(calls[call.position]["function"]["arguments"])
    except (TypeError, KeyError, ValueError, RecursionError):
        return ""
    focus = asked.get("focus") if isinstance(asked, dict) else None
    return focus[:_LONGEST_FOCUS] if isinstance(focus, str) else ""
