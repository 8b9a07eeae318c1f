"""Text with its escapes undone: results of tools are often JSON within text."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

_ESCAPE = re.compile(
    r"""\\(?:u[0-9A-Fa-f]{4}|x[0-9A-Fa-f]{2}|[nrtbf"'/\\])|%[0-9A-Fa-f]{2}|\x1b\[[0-9;:?]{0,32}[A-Za-z]"""
)
_MARKS = ("\\", "%", "\x1b")
"""What an escape begins with: of JSON and most languages, of URLs, of a terminal's colours."""
_LETTERS = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f"}
_LEVELS = 3
"""Levels of escapes that are undone: JSON in JSON in JSON."""


@dataclass(frozen=True, slots=True)
class Unescaped:
    """A text without escapes, and the places of its parts in the original."""

    text: str
    _places: list[int]
    """Places in ``text`` of characters that were escaped."""
    _shifts: list[int]
    """Surplus length of the original up to each of them, and in all."""
    _starts: list[int]
    """Start of each of them in the original."""
    _ends: list[int]
    """And its end."""

    def original(self, start: int, end: int) -> tuple[int, int]:
        """Return the part of the original that ``text[start:end]`` is from; no escape is cut."""
        return (
            start + self._shifts[bisect_left(self._places, start)],
            end + self._shifts[bisect_left(self._places, end)],
        )

    def escape_at(self, place: int) -> tuple[int, int] | None:
        """Return the escape in the original that ``place`` cuts; None if it cuts none."""
        at = bisect_left(self._starts, place) - 1
        if at < 0:
            return None
        end = self._ends[at]
        return (self._starts[at], end) if place < end else None


@dataclass(frozen=True, slots=True)
class View:
    """A text as it is written, or with its escapes undone once or more."""

    text: str
    _levels: tuple[Unescaped, ...] = ()

    def original(self, start: int, end: int) -> tuple[int, int]:
        """Return the part of the text as written that ``text[start:end]`` is from."""
        for level in reversed(self._levels):
            start, end = level.original(start, end)
        return start, end

    def escape_at(self, place: int) -> tuple[int, int] | None:
        """Return the escape in the text as written that ``place`` cuts; None if it cuts none."""
        return self._levels[0].escape_at(place) if self._levels else None


def views(text: str) -> Iterator[View]:
    """Yield the text as it is written, then with its escapes undone, level by level."""
    levels: tuple[Unescaped, ...] = ()
    yield View(text)
    while len(levels) < _LEVELS and (inner := _unescaped(text)) is not None:
        levels, text = (*levels, inner), inner.text
        yield View(text, levels)


def _unescaped(text: str) -> Unescaped | None:
    """Return the text with its escapes undone; None if it has none."""
    if not any(map(text.__contains__, _MARKS)):
        return None
    parts: list[str] = []
    places: list[int] = []
    starts: list[int] = []
    ends: list[int] = []
    lengths: list[int] = [0]
    at = size = 0
    for found in _ESCAPE.finditer(text):
        start, end = found.span()
        size += start - at
        places.append(size)
        starts.append(start)
        ends.append(end)
        character = _character(found.group())
        lengths.append(end - start - len(character))
        parts += (text[at:start], character)
        at, size = end, size + len(character)
    if not places:
        return None
    return Unescaped("".join((*parts, text[at:])), places, [*accumulate(lengths)], starts, ends)


def _character(escape: str) -> str:
    if escape[0] == "\x1b":
        return ""
    if escape[0] == "%":
        return chr(int(escape[1:], 16))
    letter = escape[1]
    return chr(int(escape[2:], 16)) if letter in "ux" else _LETTERS.get(letter, letter)
