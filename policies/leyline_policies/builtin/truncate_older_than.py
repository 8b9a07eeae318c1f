"""The policy that shortens old tool results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from leyline_policies.builtin.old_results import ShorterResults, of_tools
from leyline_policies.context import Context
from leyline_policies.conversation import map_text
from leyline_policies.policy import Message

_LONGEST_MARKER = len("\n[999999999999 characters cut]\n")


@dataclass(frozen=True, slots=True)
class TruncateOlderThan(ShorterResults):
    """Shorten all but the newest ``n`` tool results to a head and a tail.

    A text of more than ``max_chars`` characters becomes its beginning and its end around a line
    that gives the number of cut characters, together at most ``max_chars`` long (or that line alone
    where it does not fit). Shorter texts stay, so a shortened result is never shortened again. Each
    text part of a part list counts for itself; images and other parts stay. With ``tools`` only
    results of these tools are counted and shortened.
    """

    name: ClassVar[str] = "truncate_older_than"

    n: int = 2
    max_chars: int = 200
    tools: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for a negative ``n`` or ``max_chars``, or an empty ``tools``."""
        for key, value in (("n", self.n), ("max_chars", self.max_chars)):
            if value < 0:
                raise ValueError(f"{key}={value} is negative; it must be 0 or more")
        if self.tools is not None and not self.tools:
            raise ValueError("tools=[] names no tool; leave it out to shorten the results of all")

    def _places(self, messages: list[Message], context: Context) -> Sequence[int]:
        results = of_tools(context.results(messages), messages, context, tools=self.tools)
        return results[: max(0, len(results) - self.n)]

    def _shorter(self, message: Message) -> Message:
        return map_text(message, self._shorten)

    def _shorten(self, text: str) -> str:
        if len(text) <= max(self.max_chars, _LONGEST_MARKER):
            return text
        # Sized with the whole text's length, which has at least as many digits as the cut length.
        kept = max(0, self.max_chars - len(_marker(len(text))))
        tail = kept // 2
        head = kept - tail
        return text[:head] + _marker(len(text) - kept) + text[len(text) - tail :]


def _marker(cut: int) -> str:
    return f"\n[{cut} characters cut]\n"
