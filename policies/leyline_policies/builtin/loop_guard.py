"""The policy that prunes the repeats of an agent that runs in a circle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from leyline_policies.builtin.arguments import canonical_arguments
from leyline_policies.builtin.notes import with_note
from leyline_policies.context import Context
from leyline_policies.conversation import ToolCall, pair_calls
from leyline_policies.marks import drop
from leyline_policies.policy import Message, Mode

_Asked = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class _Step:
    """An assistant message that calls tools, and the results directly after it."""

    start: int
    end: int
    signature: tuple[Any, ...]


@dataclass(slots=True)
class _Repeated:
    """Circles as calls alone show them; a look at results costs more."""

    asked: list[_Asked] = field(default_factory=list)
    """Calls by assistant message."""
    same: dict[int, int] = field(default_factory=dict)
    """Number of messages, by period, up to the last that asked the same as a period before."""
    enough: bool = False
    """True if any circle may have been long enough."""


@dataclass(frozen=True, slots=True)
class LoopGuard:
    """Prune an agent's repeats: the same calls, arguments and results.

    When a step, or a circle of up to ``max_period`` steps, follows on itself ``repeats`` times or
    more, all but the last time are removed, and a line in the last result says so. A step is an
    assistant message with calls and their results; text that the assistant wrote beside its calls
    makes no difference, and is removed with them. Anything in between, or a result that differs,
    ends the circle.

    Pruned repeats stay pruned when the agent continues with something else: the whole history is
    searched for circles, not only its end.
    """

    name: ClassVar[str] = "loop_guard"
    mode: ClassVar[Mode] = "amortize"
    trusted: ClassVar[bool] = True

    repeats: int = 3
    max_period: int = 4

    def __post_init__(self) -> None:
        """Raise ValueError for fewer than two repeats or a period below 1 or above 16."""
        if self.repeats < 2:
            raise ValueError(f"repeats={self.repeats} must be 2 or more")
        if not 1 <= self.max_period <= 16:
            raise ValueError(f"max_period={self.max_period} must be 1 to 16")

    def transform(self, messages: list[Message], turn_idx: int, context: Context) -> list[Message]:
        """Return the messages without the repeats."""
        each_asked = context.each(messages, _asked)
        if not context.fold(each_asked, self._see, _Repeated).enough:
            return messages
        asked = {index: said for index, said in enumerate(each_asked) if said is not None}
        steps = [*_steps(messages, asked)]
        edited: list[Message] | None = None
        at = 0
        while at + self.repeats <= len(steps):
            period, times = self._circle(steps, at)
            if times < self.repeats:
                at += 1
                continue
            edited = list(messages) if edited is None else edited
            last = at + period * (times - 1)
            for step in steps[at:last]:
                for index in range(step.start, step.end):
                    edited[index] = context.once(messages[index], _dropped, "drop")
            at = last + period
            end = steps[at - 1].end - 1
            noted = _Noted(times, period)
            edited[end] = context.once(messages[end], noted, noted)
            context.note("loop", repeats=times, period=period)
        return messages if edited is None else edited

    def _see(self, seen: _Repeated, asked: _Asked | None) -> None:
        """Add one message, and note if calls alone repeat often enough."""
        if asked is None:
            return
        for period in range(1, min(self.max_period, len(seen.asked)) + 1):
            repeats = bool(asked) and asked == seen.asked[-period]
            same = seen.same[period] = seen.same.get(period, 0) + 1 if repeats else 0
            seen.enough = seen.enough or same >= period * (self.repeats - 1)
        seen.asked.append(asked)

    def _circle(self, steps: Sequence[_Step], at: int) -> tuple[int, int]:
        """Return the shortest period that repeats often enough from ``at`` on, and how often."""
        for period in range(1, self.max_period + 1):
            same = 0  # steps that equal the one a period before
            for ahead in range(at + period, len(steps)):
                before = steps[ahead - period]
                if steps[ahead].signature != before.signature or not _adjacent(steps, ahead):
                    break
                same += 1
            times = 1 + same // period
            inside = all(_adjacent(steps, i) for i in range(at + 1, min(at + period, len(steps))))
            if times >= self.repeats and inside:
                return period, times
        return 1, 1


def _adjacent(steps: Sequence[_Step], index: int) -> bool:
    return steps[index].start == steps[index - 1].end


def _asked(message: Message) -> _Asked | None:
    """Return the calls of an assistant message: tools and arguments; None for any other."""
    if message.get("role") != "assistant":
        return None
    said = canonical_arguments(message)
    return tuple((call.name, said[call.position]) for call in pair_calls([message]))


def _steps(messages: Sequence[Message], asked: Mapping[int, _Asked]) -> Iterator[_Step]:
    """Yield the steps whose results are directly after the calls, one by one."""
    calls: dict[int, list[ToolCall]] = {}
    for call in pair_calls(messages):
        calls.setdefault(call.message, []).append(call)
    for start, own in calls.items():
        end = start + 1 + len(own)
        if sorted(i for call in own for i in call.results) == [*range(start + 1, end)]:
            contents = [messages[i].get("content") for call in own for i in call.results]
            yield _Step(start, end, (asked[start], contents))


def _dropped(message: Message) -> Message:
    return drop(message, cause="loop")


@dataclass(frozen=True, slots=True)
class _Noted:
    """The last result of a circle, with a line on what was pruned before it."""

    times: int
    period: int

    def __call__(self, message: Message) -> Message:
        what = "This step was" if self.period == 1 else f"These {self.period} steps were"
        note = (
            f"[{what} taken {self.times} times in a row with the same result; "
            "the earlier times are left out. Try something else.]"
        )
        return with_note(message, note, cause="loop")
