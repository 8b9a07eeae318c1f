"""Sets of characters as regular expressions mean them: categories, and letters alike but for case.

They are those of the package `regex`, so that a pattern means the same to both engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

Range = tuple[int, int]
"""First and last code point."""

LAST = 0x10FFFF
_CASED_END = 0x1F000
"""No letter from here on has another case."""
_DOTTED, _DOTLESS = 0x130, 0x131
_EQUAL_CAPITALS = ((0x390, 0x1FD3), (0x3B0, 0x1FE3), (0xFB05, 0xFB06))
"""Letters alike by capitals of several letters."""


@lru_cache(maxsize=1)
def categories() -> Mapping[str, tuple[Range, ...]]:
    """Return the ranges of ``word``, ``digit`` and ``space``; of those in ASCII as ``a:word``…"""
    import regex

    everything = "".join(map(chr, range(LAST + 1)))
    found = {"word": r"\w+", "digit": r"\d+", "space": r"\s+"}
    found |= {f"a:{name}": f"(?a){text}" for name, text in found.items()}
    return {
        name: tuple((run.start(), run.end() - 1) for run in regex.finditer(text, everything))
        for name, text in found.items()
    }


@lru_cache(maxsize=1)
def case_variants() -> Mapping[int, frozenset[int]]:
    """Return for each code point that has variants all that are alike but for case, itself too."""
    groups: dict[int, frozenset[int]] = {}
    for code in {*range(_CASED_END)} - {_DOTTED, _DOTLESS}:
        char = chr(code)
        others = {char.lower(), char.upper(), char.title()} - {char}
        if others:
            _join(groups, {code, *(ord(other) for other in others if len(other) == 1)})
    for pair in _EQUAL_CAPITALS:
        _join(groups, {*pair})
    small, capital = map(ord, "iI")
    # Not alike among themselves: each is a letter's other case in Turkish only.
    return groups | {
        small: frozenset({small, capital, _DOTTED}),
        capital: frozenset({small, capital, _DOTLESS}),
        _DOTTED: frozenset({small, _DOTTED}),
        _DOTLESS: frozenset({capital, _DOTLESS}),
    }


def _join(groups: dict[int, frozenset[int]], alike: set[int]) -> None:
    joined = frozenset(alike).union(*(groups.get(code, frozenset()) for code in alike))
    if len(joined) > 1:
        groups.update(dict.fromkeys(joined, joined))
