"""The policy that drops tool calls which failed and were retried."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import ClassVar

from leyline_policies.builtin.patterns import Matcher, UserPattern, compile_pattern
from leyline_policies.conversation import ToolCall, pair_calls, text_of
from leyline_policies.failures import is_failure
from leyline_policies.policy import Message, Mode


@dataclass(frozen=True, slots=True)
class DropFailedCalls:
    """Drop tool calls that failed, once a later call of the same tool has succeeded.

    The call goes together with its result; other calls of the same assistant message stay, and so
    does the message's own text. A call made in the same message is no retry: the model had not seen
    the failure yet. What counts as a failure is described in `leyline_policies.failures`; with
    ``pattern``, a regular expression, it is a result whose text the pattern matches anywhere.
    """

    name: ClassVar[str] = "drop_failed_calls"
    mode: ClassVar[Mode] = "amortize"

    pattern: str | None = None
    _failure: UserPattern | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raises ValueError when ``pattern`` is no regular expression."""
        compiled = None if self.pattern is None else compile_pattern(self.pattern)
        object.__setattr__(self, "_failure", compiled)

    def transform(self, messages: list[Message], turn_idx: int) -> list[Message]:
        """Return the messages without the failed calls and their results.

        Raises PatternTimeoutError.
        """
        dropped = self._retried(messages)
        if not dropped:
            return list(messages)
        results = {index for call in dropped for index in call.results}
        gone: dict[int, set[int | None]] = {}
        for call in dropped:
            gone.setdefault(call.message, set()).add(call.position)
        kept = (
            _without_calls(message, gone[index]) if index in gone else message
            for index, message in enumerate(messages)
            if index not in results
        )
        return [message for message in kept if message is not None]

    def _retried(self, messages: list[Message]) -> list[ToolCall]:
        """The failed calls that a later call of the same tool made good."""
        failed: list[ToolCall] = []
        last_success: dict[str, int] = {}
        matcher = None if self._failure is None else self._failure.matcher()
        for call in pair_calls(messages):
            if call.results and _failed(messages, call, matcher):
                failed.append(call)
            elif call.results:
                last_success[call.name] = call.message
        return [call for call in failed if last_success.get(call.name, -1) > max(call.results)]


def _failed(messages: Sequence[Message], call: ToolCall, matcher: Matcher | None) -> bool:
    results = (messages[index] for index in call.results)
    if matcher is None:
        return any(is_failure(result) for result in results)
    return any(matcher.found_in(text_of(result)) for result in results)


def _without_calls(message: Message, positions: Set[int | None]) -> Message | None:
    """The assistant message without these calls, or None when nothing of substance is left."""
    edited = dict(message)
    if None in positions:
        del edited["function_call"]
    if positions - {None}:
        calls = enumerate(message["tool_calls"])
        edited["tool_calls"] = [call for place, call in calls if place not in positions]
        if not edited["tool_calls"]:
            del edited["tool_calls"]
    return edited if _says_something(edited) else None


def _says_something(message: Message) -> bool:
    """Whether an assistant message may stand: calls, text, or another payload of its own."""
    if message.get("tool_calls") or message.get("function_call"):
        return True
    content = message.get("content")
    if isinstance(content, list):
        # A part that is no text (a refusal, an image) is substance, blank text is not.
        other = any(isinstance(part, dict) and "text" not in part for part in content)
        return other or bool(text_of(message).strip())
    return bool(text_of(message).strip() or message.get("refusal") or message.get("audio"))
