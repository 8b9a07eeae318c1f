"""The policy that keeps the instructions the same from turn to turn."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from leyline_policies.builtin.notes import with_note
from leyline_policies.context import Context
from leyline_policies.conversation import BEARERS, instructions_end, map_text, text_of
from leyline_policies.marks import edit
from leyline_policies.policy import Message, Mode

_PINNED = "pinned"
_MAX_TIMES = 64
_MAX_LINE = 400
_CLOCK = re.compile(r"(?i)\b(?:now|today|date|time|datetime|timestamp|clock)\b")
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]{0,6}"
_TIME = re.compile(
    rf"""(?x)
    \b\d{{4}}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d{{1,9}})?)?)?(?:Z|[+-]\d\d:?\d\d)?
    | \b\d{{1,2}}:\d\d(?::\d\d(?:\.\d{{1,9}})?)?(?:\ ?[AaPp]\.?[Mm]\b)?
    | \b\d{{1,4}}[/.]\d{{1,2}}[/.]\d{{1,4}}\b
    | \b{_MONTH}\.?\ \d{{1,2}}(?:st|nd|rd|th)?\b
    | \b\d{{1,2}}(?:st|nd|rd|th)?\ {_MONTH}\b
    | \b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]{{0,6}}\b
    | \b1[5-9]\d{{8}}(?:\d{{3}})?(?:\.\d{{1,9}})?\b
    | \b20\d\d\b
    """
)


@dataclass(frozen=True, slots=True)
class PinSystem:
    """Stop the clock in the instructions, so that the cache after them holds.

    Some agents write the time into their system prompt, which then differs on every turn, and
    nothing after it is found in the cache. This policy keeps dates and times there as they were on
    the session's first turn: in the system and developer messages at the front, on lines that speak
    of the date or the time. All else in these messages stays as the client sends it. With
    ``now="end"`` the lines as they read now go into the newest message of the user or tool result,
    where little comes after them; with ``now="omit"`` the model doesn't see them.

    Of the instructions, the session's state holds those dates and times only. If their number
    changes, the instructions are new ones, and are pinned again. Text that a client leaves out is
    not restored: instructions that it no longer sends may be withdrawn.
    """

    name: ClassVar[str] = "pin_system"
    mode: ClassVar[Mode] = "amortize"
    trusted: ClassVar[bool] = True

    now: Literal["end", "omit"] = "end"

    def __post_init__(self) -> None:
        """Raise ValueError for an unknown ``now``."""
        if self.now not in ("end", "omit"):
            raise ValueError(f"now={self.now} must be end or omit")

    def transform(self, messages: list[Message], turn_idx: int, context: Context) -> list[Message]:
        """Return the messages with the clock of the first turn."""
        front = messages[: instructions_end(messages)]
        found = [context.once(message, _times) for message in front]
        times = [time for each in found for time in each]
        pinned = _pinned(context.state.get(_PINNED), len(times))
        if pinned is None:
            context.state.pop(_PINNED, None)
            if 0 < len(times) <= _MAX_TIMES:
                context.state[_PINNED] = times
            return messages
        if pinned == times:
            return messages
        edited = list(messages)
        at = 0
        for index, own in enumerate(found):
            wanted = tuple(pinned[at : at + len(own)])
            at += len(own)
            if wanted != own:
                edited[index] = context.once(messages[index], _Stopped(wanted), wanted)
        if self.now == "end":
            _tell(edited, front, edited[: len(front)])
        return edited


def _pinned(stored: Any, count: int) -> list[str] | None:
    """Return the pinned times, if they are as many as there are now."""
    if not isinstance(stored, list) or len(stored) != count:
        return None
    return stored if all(isinstance(time, str) for time in stored) else None


def _tell(edited: list[Message], before: Sequence[Message], after: Sequence[Message]) -> None:
    """Put the changed lines, as they were, into the newest message that may bear them."""
    lines = [line for old, new in zip(before, after, strict=True) for line in _changed(old, new)]
    behind = range(len(edited) - 1, len(before) - 1, -1)
    at = next((index for index in behind if edited[index].get("role") in BEARERS), None)
    if at is not None and lines:
        note = "\n".join(("[From the instructions, as of now]", *lines))
        edited[at] = with_note(edited[at], note, cause="clock")


def _changed(old: Message, new: Message) -> Iterator[str]:
    if old is not new:
        for line, stopped in zip(text_of(old).split("\n"), text_of(new).split("\n"), strict=True):
            if line != stopped:
                yield line.strip()


def _clocks(text: str) -> Iterator[re.Match[str]]:
    """Yield dates and times on the lines that mention them."""
    begin = 0
    for line in text.split("\n"):
        if len(line) <= _MAX_LINE and _CLOCK.search(line):
            yield from _TIME.finditer(text, begin, begin + len(line))
        begin += len(line) + 1


def _times(message: Message) -> tuple[str, ...]:
    found: list[str] = []

    def note(text: str) -> str:
        found.extend(each.group() for each in _clocks(text))
        return text

    map_text(message, note)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Stopped:
    """Instructions with pinned times in place of their own."""

    times: tuple[str, ...]

    def __call__(self, message: Message) -> Message:
        left = iter(self.times)

        def stop(text: str) -> str:
            parts: list[str] = []
            at = 0
            for found in _clocks(text):
                parts += (text[at : found.start()], next(left))
                at = found.end()
            return "".join((*parts, text[at:]))

        return edit(message, content=map_text(message, stop)["content"], cause="clock")
