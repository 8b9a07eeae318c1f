"""Regular expressions from settings, matched within a budget: a request may bring its own.

The syntax is that of `re`. The package `regex` does the matching, as it can stop in time and lets
other threads run meanwhile; it is imported when it is first needed.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from time import thread_time
from typing import Any, TypeVar

from leyline_policies.errors import PolicyError, shown

MATCH_BUDGET_S = 0.5
"""Seconds of processor time that one transform call of a policy may spend on matching.

Megabytes of text take milliseconds; only patterns that backtrack without end come near it.
"""

MAX_SIZE = 20_000
"""Maximum number of a pattern's parts, with repetitions written out, as `regex` does in memory."""

_LITERAL = re.compile(r"[\w\s-]+")
_T = TypeVar("_T")


class PatternTimeoutError(PolicyError):
    """A policy's regular expression takes too long on this conversation."""


@dataclass(frozen=True, slots=True)
class UserPattern:
    """A checked regular expression."""

    text: str = field(repr=False)

    def matcher(self, budget: Budget | None = None) -> Matcher:
        """Return a matcher within ``budget``; by default within that of one transform call."""
        return Matcher(_compiled(self.text), Budget(MATCH_BUDGET_S) if budget is None else budget)

    def matches_nothing(self) -> bool:
        """Return True if it matches within empty text. Raises PatternTimeoutError."""
        return _LITERAL.fullmatch(self.text) is None and self.matcher().found_in("")


class Budget:
    """Processor time that the thread may yet spend, from now on, on any work."""

    def __init__(self, seconds: float) -> None:
        self._end = thread_time() + seconds

    @property
    def left_s(self) -> float:
        """Seconds left; negative if it spent more."""
        return self._end - thread_time()

    def extend(self, seconds: float) -> None:
        """Add seconds to it."""
        self._end += seconds

    def check(self) -> None:
        """Raise PatternTimeoutError if nothing is left."""
        if self.left_s <= 0:
            raise PatternTimeoutError("the search takes too long on this conversation")


class Matcher:
    """A pattern, and the budget within which it is matched. For one thread."""

    def __init__(self, pattern: Any, budget: Budget) -> None:
        self._pattern = pattern
        self._budget = budget

    def found_in(self, text: str) -> bool:
        """Return True if the pattern matches anywhere in ``text``. Raises PatternTimeoutError."""
        return self._within(lambda limit: self._pattern.search(text, timeout=limit) is not None)

    def matches(self, text: str) -> list[re.Match[str]]:
        """Return all matches in ``text`` that don't overlap. Raises PatternTimeoutError."""

        def all_of(limit: float) -> list[re.Match[str]]:
            found: list[re.Match[str]] = []

            def note(match: re.Match[str]) -> str:
                found.append(match)
                return ""

            # Faster than `finditer`, above all if there is nothing to find.
            self._pattern.sub(note, text, timeout=limit)
            return found

        return self._within(all_of)

    def replaced(self, text: str, replace: Callable[[re.Match[str]], str]) -> str:
        """Return ``text`` with each match replaced. Raises PatternTimeoutError."""
        return self._within(lambda limit: str(self._pattern.sub(replace, text, timeout=limit)))

    def _within(self, match: Callable[[float], _T]) -> _T:
        limit = self._budget.left_s
        while True:
            self._budget.check()
            try:
                return match(limit)
            except TimeoutError:
                # The limit counts the processor time of all threads; ours may have had little
                # of it on a busy machine, and a slow match must not be mistaken for a hostile one.
                limit *= 2


def compile_pattern(pattern: str) -> UserPattern:
    """Check a setting's regular expression.

    Raises ValueError, which says what is wrong with it and where.
    """
    if not pattern:
        raise ValueError("pattern is empty; it would match everywhere")
    try:
        re.compile(pattern)
        if _LITERAL.fullmatch(pattern) is None:  # any other may fail or blow up in `regex`
            _check_size(pattern)
            _compiled(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"pattern={shown(pattern)} is no regular expression: {error}") from error
    return UserPattern(pattern)


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> Any:
    """Return the pattern compiled by `regex`.

    A lookup in its own cache for each text takes as long as a search.
    """
    import regex

    try:
        return regex.compile(pattern)
    except regex.error as error:
        raise ValueError(f"pattern={shown(pattern)} is no regular expression: {error}") from error


def _check_size(pattern: str) -> None:
    # The parser of `re` has no public name, but only it knows where repetitions nest.
    parser = importlib.import_module("re._parser")
    repeats = (parser.MAX_REPEAT, parser.MIN_REPEAT, parser.POSSESSIVE_REPEAT)

    def size(node: Any) -> int:
        if isinstance(node, parser.SubPattern):
            return sum(map(size, node.data))
        if not isinstance(node, tuple | list):
            return 0
        if len(node) == 2 and any(node[0] is repeat for repeat in repeats):
            least, _, repeated = node[1]
            return (int(least) + 1) * (1 + size(repeated))
        return 1 + sum(map(size, node))

    if size(parser.parse(pattern)) > MAX_SIZE:
        raise ValueError(f"pattern={shown(pattern)} repeats too much within repetitions")
