"""Text that makes a careless pattern slow, made of the pattern itself, and how its time grows."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from time import thread_time
from typing import Any

_parser = importlib.import_module("re._parser")
_REPEATS = (_parser.MAX_REPEAT, _parser.MIN_REPEAT, _parser.POSSESSIVE_REPEAT)
_CATEGORIES = {"DIGIT": "0", "SPACE": " ", "WORD": "a", "NOT_SPACE": "a", "NOT_DIGIT": "a"}
SMALL = 1_000
"""Characters of the texts by which suspects are found; those are judged on longer ones."""


def hostile_texts(pattern: str) -> Iterator[tuple[str, Callable[[int], str]]]:
    """Name and maker (by length) of texts: runs of each kind of character that the pattern has a
    class for, its beginnings over and over, and each beginning before such a run."""
    tree = _parser.parse(pattern)
    # Line breaks and backslashes are in every text.
    letters = dict.fromkeys(("\n", "\\", *_letters(tree)))
    begun = dict.fromkeys(("", *_beginnings(tree)))
    for letter in letters:
        for start in begun:
            # The last character makes sure that what began with the run comes to nothing.
            yield (
                f"{start!r} and a run of {letter!r}",
                lambda n, s=start, c=letter: s + c * n + "\0",
            )
            yield f"{start + letter!r} repeated", partial(repeated, start + letter)
    for start in filter(None, begun):
        yield f"{start!r} repeated", partial(repeated, start)
        yield f"lines of x{start!r}", partial(repeated, f"x{start}\n")


def repeated(unit: str, size: int) -> str:
    """``unit`` over and over, ``size`` characters of it, and one that ends it."""
    return (unit * (size // len(unit) + 1))[:size] + "\0"


def _before_run(start: str, letter: str, size: int) -> str:
    """``start`` and a run, and a character that makes sure that nothing comes of it."""
    return f"{start}{letter * size}\0"


def grows_too_fast(search: Callable[[str], object], made: Callable[[int], str]) -> bool:
    """Return True if four times the text takes clearly more than four times the processor time.

    Time is noisy, so what looks too fast on short texts is looked at again on longer ones, and it
    is the least of several times that counts.
    """
    if _seconds(search, made(4 * SMALL)) < 4e-4:
        return False
    if _ratio(search, made, SMALL, times=2) < 6:
        return False
    return all(_ratio(search, made, 16 * SMALL, times=3) > 8 for _ in range(3))


def _ratio(
    search: Callable[[str], object], made: Callable[[int], str], size: int, times: int
) -> float:
    short, long = made(size), made(4 * size)
    least = min(_seconds(search, short) for _ in range(times))
    return min(_seconds(search, long) for _ in range(times)) / max(least, 1e-5)


def _seconds(search: Callable[[str], object], text: str) -> float:
    begun = thread_time()
    search(text)
    return thread_time() - begun


def _beginnings(tree: Any, begun: str = "") -> Iterator[str]:
    """Longer and longer beginnings of a match, inside of groups, too."""
    for item in tree:
        kind, argument = item
        if kind is _parser.SUBPATTERN:
            yield from _beginnings(argument[-1], begun)
        elif kind is _parser.ATOMIC_GROUP:
            yield from _beginnings(argument, begun)
        elif kind is _parser.BRANCH:
            yield from _beginnings(argument[1][0], begun)
        elif kind in _REPEATS and len(argument[2]) == 1:
            yield from _beginnings(argument[2], begun)
        begun += _example(item)
        yield begun


def _example(item: Any) -> str:
    """A short text that the item matches."""
    kind, argument = item
    if kind is _parser.LITERAL:
        return chr(argument)
    if kind in _REPEATS:
        least, most, repeats = argument
        return "".join(map(_example, repeats)) * max(int(least), int(most > 0))
    if kind is _parser.BRANCH:
        return "".join(map(_example, argument[1][0]))
    if kind is _parser.SUBPATTERN:
        return "".join(map(_example, argument[-1]))
    if kind is _parser.ATOMIC_GROUP:
        return "".join(map(_example, argument))
    return next(_letters([item]), "")


def _letters(tree: Any) -> Iterator[str]:
    """A character or two of each class that the pattern has, wherever it does."""
    for kind, argument in tree:
        if kind is _parser.ANY:
            yield "x"
        elif kind is _parser.IN:
            yield from islice(_members(argument), 3)
        elif kind in _REPEATS:
            yield from _letters(argument[2])
            yield from (chr(each) for kind, each in argument[2] if kind is _parser.LITERAL)
        elif kind is _parser.BRANCH:
            for way in argument[1]:
                yield from _letters(way)
        elif kind in (_parser.SUBPATTERN, _parser.ASSERT, _parser.ASSERT_NOT):
            yield from _letters(argument[-1])
        elif kind is _parser.ATOMIC_GROUP:
            yield from _letters(argument)


def _members(members: Any) -> Iterator[str]:
    """Characters of a class, its signs first."""
    if members[0][0] is _parser.NEGATE:
        yield "a"
        return
    for kind, argument in reversed(members):
        if kind is _parser.LITERAL:
            yield chr(argument)
        elif kind is _parser.RANGE:
            yield chr(argument[0])
        elif kind is _parser.CATEGORY:
            yield _CATEGORIES.get(str(argument).removeprefix("CATEGORY_"), "-")
