"""Clues: texts that any match of a pattern contains."""

from __future__ import annotations

import importlib
from typing import Any

Clues = tuple[str, ...]
_ENOUGH = 8
_PLANE = 0xFFFF


def clues_of(pattern: str) -> Clues | None:
    """Return texts of which any match contains one, case aside (small letters here).

    None if the pattern requires no text in particular.
    """
    # The parser of `re` has no public name, but only it knows how patterns are built.
    parser = importlib.import_module("re._parser")
    return _of_sequence(parser.parse(pattern), parser)


def _of_sequence(items: Any, parser: Any) -> Clues | None:
    """Return the best clues of one of the items: the longer they are, the fewer texts have them."""
    found: list[Clues] = []
    letters = ""
    for kind, argument in items:
        if letter := _letter(kind, argument, parser):
            letters += letter
            continue
        if letters:
            found.append((letters,))
        letters = ""
        clues = _of_item(kind, argument, parser)
        if clues is not None:
            found.append(clues)
    if letters:
        found.append((letters,))
    return max(found, key=lambda clues: (min(map(len, clues)), -len(clues)), default=None)


def _of_item(kind: Any, argument: Any, parser: Any) -> Clues | None:
    repeats = (parser.MAX_REPEAT, parser.MIN_REPEAT, parser.POSSESSIVE_REPEAT)
    if kind is parser.SUBPATTERN:
        return _of_sequence(argument[-1], parser)
    if kind is parser.ATOMIC_GROUP:
        return _of_sequence(argument, parser)
    if kind in repeats and argument[0] > 0:
        least, _, repeated = argument
        letters = [_letter(inner, value, parser) for inner, value in repeated]
        if all(letters):
            return ("".join(letters * min(int(least), _ENOUGH)),)
        return _of_sequence(repeated, parser)
    if kind is parser.BRANCH:
        ways = [_of_sequence(way, parser) for way in argument[1]]
        if all(ways):
            return tuple(dict.fromkeys(clue for way in ways for clue in way or ()))
    return None


def _letter(kind: Any, argument: Any, parser: Any) -> str:
    """Return the text that the item always matches, in small letters (`search.in_small_letters`).

    Empty if it may differ.
    """
    if kind is parser.LITERAL and chr(argument).isascii():
        return chr(argument).lower()
    if kind is parser.IN:
        lows = [low for each, members in argument if (low := _lowest(each, members, parser))]
        # No letter outside the plane has an ASCII letter for its other case.
        if len(lows) == len(argument) and min(lows) > _PLANE:
            return "?"
    return ""


def _lowest(kind: Any, members: Any, parser: Any) -> int | None:
    if kind is parser.RANGE:
        return int(members[0])
    return int(members) if kind is parser.LITERAL else None
