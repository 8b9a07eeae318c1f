"""Rules of names, and the way in which a name breaks one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

_PATTERN = re.compile(r"\^?(\[.+\])\{(\d+)(?:,(\d+))?\}\$?")
_RANGES = {"A-Z": "capital letters", "a-z": "small letters", "0-9": "digits"}
_LETTERS = "letters"


@dataclass(frozen=True)  # no slots: the expression is compiled once
class NameRule:
    """Allowed characters and lengths.

    Args:
        characters: a class of a regular expression, such as ``[a-z0-9_]``.
        words: the characters in words.
    """

    characters: str
    words: str
    most: int
    least: int = 1

    @cached_property
    def _allowed(self) -> re.Pattern[str]:
        return re.compile(self.characters)

    def broken(self, name: str) -> str | None:
        """Return what is wrong with a name, for a place after it or its field; None if nothing is.

        It quotes at most one character of the name.
        """
        if not self.least <= len(name) <= self.most:
            lengths = f"{self.least} to {self.most}" if self.least != self.most else f"{self.most}"
            return f"has {len(name)} characters, and needs {lengths}"
        for place, character in enumerate(name, start=1):
            if not self._allowed.fullmatch(character):
                return f"has {character!a} at place {place}; use only {self.words}"
        return None


def rule_of(pattern: str) -> NameRule | None:
    """Return the rule of a pattern such as ``^[A-Za-z0-9._-]{1,64}$``; None for any other form."""
    found = _PATTERN.fullmatch(pattern)
    if found is None:
        return None
    characters, least, most = found[1], int(found[2]), int(found[3] or found[2])
    return NameRule(characters, _words(characters), most, least)


def _words(characters: str) -> str:
    """Return a class of characters in words."""
    left, ranges = characters[1:-1], []
    for text, words in _RANGES.items():
        if text in left:
            left = left.replace(text, "", 1)
            ranges.append(words)
    if ranges[:2] == list(_RANGES.values())[:2]:
        ranges[:2] = [_LETTERS]
    named = [*ranges, *([" ".join(left)] if left else [])]
    return " and ".join(filter(None, (", ".join(named[:-1]), named[-1])))


def texts_at(value: object, path: str) -> Iterator[str]:
    """Yield the texts at a path such as ``.share``, or ``.groups[...]`` for any item of a list."""
    key, _, rest = path.lstrip(".").partition(".")
    name, _, items = key.partition("[")
    if not key:
        if isinstance(value, str):
            yield value
        return
    found = value.get(name) if isinstance(value, dict) and name else value
    for each in found if items and isinstance(found, list) else [found]:
        yield from texts_at(each, rest)
