"""The policy that warns the model when its context window is nearly full."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, Literal

from leyline_policies.builtin.notes import with_note
from leyline_policies.context import Context
from leyline_policies.conversation import BEARERS
from leyline_policies.policy import Message, Mode

_URGENT = "Complete the current task efficiently and avoid unnecessary tool calls."
_CRITICAL = "Complete the current task immediately and avoid unnecessary tool calls."


@dataclass(frozen=True, slots=True)
class _Level:
    """A limit that was reached, and the number of tokens that did."""

    used: int
    limit: int

    @property
    def text(self) -> str:
        """Text of the warning to the model."""
        critical = self.used >= self.limit
        return (
            f"{'CRITICAL' if critical else 'URGENT'}: "
            "Configured run limits are approaching.\n"
            f"- Context window: {self.used}/{self.limit} tokens used "
            f"({self.used / self.limit:.0%}); {max(0, self.limit - self.used)} remaining.\n"
            f"{_CRITICAL if critical else _URGENT}"
        )


@dataclass(frozen=True, slots=True)
class WarnNearLimits:
    """Tell the model once the messages take up ``threshold`` of its context window, and once all.

    The limit is ``max_tokens``, or ``max_fraction`` of the model's context window; if neither is
    known, there is no warning. The warning goes into the message with which the limit was reached,
    and stays there: history before it is not touched, so nothing of the cache is lost. When another
    policy makes the conversation short again, the warning is removed. With ``place="end"`` it is
    instead a message of the user after the last one, with the figures of this turn, as the original
    sends it to most models; some templates then drop the thinking of the run at hand.

    On every turn near the limit the note ``near_limit`` reports the ``fraction``.

    Text and levels are those of pydantic-ai-harness 0.62 (``WarnNearLimits``), of whose limits this
    knows the context window.
    """

    name: ClassVar[str] = "warn_near_limits"
    mode: ClassVar[Mode] = "amortize"
    trusted: ClassVar[bool] = True

    threshold: float = 0.7
    max_tokens: int | None = None
    max_fraction: float = 1.0
    place: Literal["inside", "end"] = "inside"

    def __post_init__(self) -> None:
        """Raise ValueError for a limit or a fraction out of range."""
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} must be 1 or more")
        for key, value in (("threshold", self.threshold), ("max_fraction", self.max_fraction)):
            if not 0 < value <= 1:
                raise ValueError(f"{key}={value} must be above 0 and at most 1")
        if self.place not in ("inside", "end"):
            raise ValueError(f"place={self.place} must be inside or end")

    def transform(self, messages: list[Message], turn_idx: int, context: Context) -> list[Message]:
        """Return the messages with the warnings."""
        limit = self._limit(context)
        if limit is None or not messages:
            return messages
        used = context.total(messages)
        if used / limit < self.threshold:
            return messages
        context.note("near_limit", fraction=round(used / limit, 4))
        if self.place == "end":
            return [*messages, {"role": "user", "content": _Level(used, limit).text}]
        edited = list(messages)
        for index, level in self._reached(messages, limit, context):
            edited[index] = context.once(messages[index], _Warned(level), level)
        return edited

    def _limit(self, context: Context) -> int | None:
        if self.max_tokens is not None:
            return self.max_tokens
        return None if context.window is None else max(1, int(context.window * self.max_fraction))

    def _reached(
        self, messages: list[Message], limit: int, context: Context
    ) -> Iterator[tuple[int, _Level]]:
        """Yield the place where each level was reached: the first such request's last message."""
        wanted = [self.threshold, *([1.0] if self.threshold < 1 else ())]
        for index, used in enumerate(accumulate(context.each_tokens(messages))):
            if not wanted or used / limit < wanted[0]:
                continue
            if messages[index].get("role") not in BEARERS:
                continue
            last = index + 1 == len(messages)
            if last or messages[index + 1].get("role") == "assistant":
                yield index, _Level(used, limit)
                wanted = [level for level in wanted if used / limit < level]


@dataclass(frozen=True, slots=True)
class _Warned:
    """A message with the warning in it."""

    level: _Level

    def __call__(self, message: Message) -> Message:
        return with_note(message, self.level.text, cause="near_limit")
