"""Stop strings in text that arrives piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopResult:
    """Text that is safe to send, and whether a stop string ended it."""

    text: str
    stopped: bool = False


class StopMatcher:
    """Holds back text that may be the beginning of a stop string.

    Of several stop strings, the first that is complete ends the text, however the text was cut into
    pieces; the stop string itself is never part of it.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""

    def feed(self, text: str) -> StopResult:
        """Take the next piece of text."""
        if not self._stops:
            return StopResult(text)
        pending = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := pending.find(stop)) >= 0]
        if found:
            self._held = ""
            _, begin = min(found)
            return StopResult(pending[:begin], stopped=True)
        keep = partial_suffix(pending, self._stops)
        self._held = pending[len(pending) - keep :]
        return StopResult(pending[: len(pending) - keep])

    def flush(self) -> str:
        """Return the text held back, when no more text follows."""
        held, self._held = self._held, ""
        return held


def partial_suffix(text: str, marks: Sequence[str]) -> int:
    """Return the length of the longest suffix of ``text`` that begins one of ``marks``.

    A whole mark doesn't count.
    """
    longest = min(len(text), max((len(mark) for mark in marks), default=1) - 1)
    for length in range(longest, 0, -1):
        suffix = text[-length:]
        if any(len(mark) > length and mark.startswith(suffix) for mark in marks):
            return length
    return 0
