"""The policy that drops tool calls which failed and were retried."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from leyline_policies.builtin.patterns import Matcher, UserPattern, compile_pattern
from leyline_policies.context import Context
from leyline_policies.conversation import RESULT_ROLES, ToolCall, text_of
from leyline_policies.kinds import Pattern
from leyline_policies.marks import edit
from leyline_policies.policy import Message, Mode


@dataclass(slots=True)
class _Outcomes:
    """The calls that failed, and the place where each tool last succeeded."""

    failed: list[ToolCall] = field(default_factory=list)
    last_success: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DropFailedCalls:
    """Drop tool calls that failed, once a later call of the same tool has succeeded.

    The call is removed together with its result; other calls of the same assistant message stay,
    and so does the message's own text. A call made in the same message is no retry: the model had
    not seen the failure yet. `leyline_policies.failures` describes failures; with ``pattern``, a
    regular expression, a failure is a result whose text the pattern matches anywhere.
    """

    name: ClassVar[str] = "drop_failed_calls"
    mode: ClassVar[Mode] = "amortize"
    trusted: ClassVar[bool] = True

    pattern: Pattern | None = None
    _failure: UserPattern | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raise ValueError if ``pattern`` is no regular expression."""
        compiled = None if self.pattern is None else compile_pattern(self.pattern)
        object.__setattr__(self, "_failure", compiled)

    def transform(
        self, messages: list[Message], turn_idx: int, context: Context | None = None
    ) -> list[Message]:
        """Return the messages without the failed calls and their results.

        Raises PatternTimeoutError.
        """
        context = context or Context()
        dropped = self._retried(messages, context)
        if not dropped:
            return messages
        results = {index for call in dropped for index in call.results}
        gone: dict[int, set[int | None]] = {}
        for call in dropped:
            gone.setdefault(call.message, set()).add(call.position)
        kept: list[Message] = []
        for index, message in enumerate(messages):
            if index in gone:
                places = frozenset(gone[index])
                left = context.once(message, partial(_without_calls, positions=places), places)
                kept += [] if left is None else [left]
            elif index not in results:
                kept.append(message)
        return kept

    def _retried(self, messages: list[Message], context: Context) -> list[ToolCall]:
        """Return the failed calls that a later call of the same tool replaced."""
        if self._failure is None:
            failing = context.failed(messages)
        else:
            failing = context.each(messages, partial(_found, self._failure.matcher()), "fails")

        def see(seen: _Outcomes, call: ToolCall) -> None:
            if any(failing[index] for index in call.results):
                seen.failed.append(call)
            elif call.results:
                seen.last_success[call.name] = call.message

        seen = context.fold(context.calls(messages), see, _Outcomes, failing)
        last = seen.last_success
        return [call for call in seen.failed if last.get(call.name, -1) > max(call.results)]


def _found(matcher: Matcher, message: Message) -> bool:
    return message.get("role") in RESULT_ROLES and matcher.found_in(text_of(message))


def _without_calls(message: Message, positions: Set[int | None]) -> Message | None:
    """Return the assistant message without these calls, or None if nothing of substance is left."""
    without = ["function_call"] if None in positions else []
    members: dict[str, Any] = {}
    if positions - {None}:
        calls = enumerate(message["tool_calls"])
        left = [call for place, call in calls if place not in positions]
        if left:
            members["tool_calls"] = left
        else:
            without.append("tool_calls")
    edited = edit(message, without=without, **members)
    return edited if _says_something(edited) else None


def _says_something(message: Message) -> bool:
    """Return True if an assistant message may stay: calls, text, or another payload of its own."""
    if message.get("tool_calls") or message.get("function_call"):
        return True
    content = message.get("content")
    if isinstance(content, list):
        # A part that is no text (a refusal, an image) is substance; blank text is not.
        other = any(isinstance(part, dict) and "text" not in part for part in content)
        return other or bool(text_of(message).strip())
    return bool(text_of(message).strip() or message.get("refusal") or message.get("audio"))
