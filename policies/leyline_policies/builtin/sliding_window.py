"""The policy that drops the oldest messages."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

from leyline_policies.context import Context
from leyline_policies.conversation import ToolCall, instructions_end
from leyline_policies.policy import Message, Mode

_DEFAULT_MESSAGES = 100


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Drop the oldest messages when the conversation outgrows a limit, down to half of it.

    The limits are ``max_messages`` (the instructions at the front not counted), ``max_tokens`` and
    ``max_fraction`` of the model's context window; with none of them, 100 messages. Past one of
    them the newest ``keep_messages`` stay, or the newest with ``keep_tokens`` tokens or a little
    more; by default half of the limit, so that the cut moves seldom and the cache is lost as
    seldom. The instructions and the ``keep_first``
    messages after them stay as well, and so does the last message of the user. Calls and their
    results go together.

    The messages alone determine the cut: the policy looks at each request that the conversation
    holds, as the harness did when it sent it.

    The rule is that of pydantic-ai-harness 0.62 (``SlidingWindowCompaction``), the default limit
    and the halving those of OpenHands (``AmortizedForgettingCondenser``: 100 events). Unlike
    there the user's last message stays; with a single task, that is the first message anyway.
    """

    name: ClassVar[str] = "sliding_window"
    mode: ClassVar[Mode] = "amortize"
    trusted: ClassVar[bool] = True

    max_messages: int | None = None
    max_tokens: int | None = None
    max_fraction: float | None = None
    keep_messages: int | None = None
    keep_tokens: int | None = None
    keep_first: int = 1

    def __post_init__(self) -> None:
        """Raise ValueError for a limit out of range, or no smaller than what it keeps."""
        if self.max_fraction is not None and not 0 < self.max_fraction <= 1:
            raise ValueError(f"max_fraction={self.max_fraction} must be above 0 and at most 1")
        if self.keep_first < 0:
            raise ValueError(f"keep_first={self.keep_first} is negative; it must be 0 or more")
        for key in ("max_messages", "max_tokens", "keep_messages", "keep_tokens"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"{key}={value} must be 1 or more")
        for unit, limit in (("messages", self._most_messages), ("tokens", self.max_tokens)):
            kept = getattr(self, f"keep_{unit}")
            if kept is not None and limit is not None and kept >= limit:
                raise ValueError(f"keep_{unit}={kept} must be less than max_{unit}={limit}")
        if self.keep_messages is not None and self._most_messages is None:
            raise ValueError(f"keep_messages={self.keep_messages} needs max_messages")
        if self.keep_tokens is not None and (self.max_tokens, self.max_fraction) == (None, None):
            raise ValueError(f"keep_tokens={self.keep_tokens} needs max_tokens or max_fraction")

    @property
    def _most_messages(self) -> int | None:
        given = (self.max_messages, self.max_tokens, self.max_fraction)
        return _DEFAULT_MESSAGES if given == (None, None, None) else self.max_messages

    def transform(self, messages: list[Message], turn_idx: int, context: Context) -> list[Message]:
        """Return the messages without those that fell out of the window."""
        front = instructions_end(messages)
        most = self._limits(context)
        if not self._may_exceed(messages, front, most, context):
            return messages
        blocks = _Blocks(context.calls(messages))
        head = blocks.ceiling(min(front + self.keep_first, len(messages)))
        window = _Window(messages, front, head, most, self._targets(most, head - front), blocks)
        cut, moved_at = window.cut(context)
        if cut == head:
            return messages
        # The task as it was when the cut moved: another choice later would be one more edit.
        asked = _last_user(messages[:moved_at], head, cut)
        return [*messages[:head], *([] if asked is None else [messages[asked]]), *messages[cut:]]

    def _limits(self, context: Context) -> _Size:
        tokens = [self.max_tokens] if self.max_tokens is not None else []
        if self.max_fraction is not None and context.window:
            tokens.append(max(1, int(context.window * self.max_fraction)))
        return _Size(self._most_messages, min(tokens, default=None))

    def _targets(self, most: _Size, first: int) -> _Size:
        messages, tokens = self.keep_messages, self.keep_tokens
        if messages is None and most.messages is not None:
            messages = max(1, most.messages // 2 - first)
        if most.tokens is not None:
            tokens = most.tokens // 2 if tokens is None else min(tokens, most.tokens)
        return _Size(messages, tokens)

    def _may_exceed(
        self, messages: list[Message], front: int, most: _Size, context: Context
    ) -> bool:
        if most.messages is not None and len(messages) - front > most.messages:
            return True
        return most.tokens is not None and context.total(messages) > most.tokens


@dataclass(frozen=True, slots=True)
class _Size:
    messages: int | None
    tokens: int | None


@dataclass(frozen=True, slots=True)
class _Window:
    """The window over one conversation, whose first ``head`` messages stay."""

    messages: Sequence[Message]
    front: int
    head: int
    most: _Size
    target: _Size
    blocks: _Blocks

    def cut(self, context: Context) -> tuple[int, int]:
        """Return the start of the window after ``head``, and the number of messages by then."""
        sums: list[int] = []
        if self.most.tokens is not None:
            sums = [0, *accumulate(context.each_tokens(self.messages))]
        cut = moved_at = self.head
        for end in _requests(self.messages):
            moved = self._moved(cut, end, sums) if end > cut else cut
            if moved > cut:
                cut, moved_at = moved, end
        return cut, moved_at

    def _moved(self, cut: int, end: int, sums: Sequence[int]) -> int:
        """Return the cut after the request of the first ``end`` messages."""
        aims = [cut]
        count = self.head - self.front + end - cut
        if self.most.messages is not None and count > self.most.messages:
            aims.append(end - (self.target.messages or 1))
        if self.most.tokens is not None and sums[self.head] + sums[end] - sums[cut] > (
            self.most.tokens
        ):
            # The latest place after which there are still that many tokens.
            aims.append(bisect_right(sums, sums[end] - (self.target.tokens or 0), cut, end) - 1)
        aim = max(aims)
        return max(cut, self.blocks.floor(min(aim, end - 1))) if aim > cut else cut


class _Blocks:
    """The stretches from a call to its last result, which no cut may split."""

    def __init__(self, calls: Sequence[ToolCall]) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for call in calls:
            end = max(call.results, default=call.message)
            if self._ends and call.message <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            elif call.results:
                self._starts.append(call.message)
                self._ends.append(end)

    def floor(self, cut: int) -> int:
        """Return the last place at or before ``cut`` that splits none."""
        at = bisect_left(self._starts, cut) - 1
        return self._starts[at] if at >= 0 and cut <= self._ends[at] else cut

    def ceiling(self, cut: int) -> int:
        """Return the first place at or after ``cut`` that splits none."""
        at = bisect_left(self._starts, cut) - 1
        return self._ends[at] + 1 if at >= 0 and cut <= self._ends[at] else cut


def _requests(messages: Sequence[Message]) -> Iterator[int]:
    """Yield the number of messages of each request: all up to an answer, and all there are now."""
    for index, message in enumerate(messages):
        if message.get("role") == "assistant":
            yield index
    yield len(messages)


def _last_user(messages: Sequence[Message], head: int, cut: int) -> int | None:
    """Return the place of the user's last message if the cut would remove it."""
    for index in range(len(messages) - 1, head - 1, -1):
        if messages[index].get("role") == "user":
            return index if index < cut else None
    return None
