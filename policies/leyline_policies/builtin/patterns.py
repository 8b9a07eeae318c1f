"""Regular expressions from settings: a request may bring its own.

The syntax is that of `re`. RE2 matches what it can express, in time proportional to the text
(`leyline_policies.builtin.linear_pattern`). The package `regex` matches the rest, within a budget,
as it can stop in time. Both let other threads run meanwhile, and are imported when first needed.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from time import thread_time
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from leyline_policies.errors import PolicyError, shown

if TYPE_CHECKING:
    from leyline_policies.builtin.linear_pattern import LinearPattern

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


class Match(Protocol):
    """A match of either engine."""

    def span(self, group: Any = 0, /) -> tuple[int, int]:
        """Return first place and end of a group; -1 and -1 if it took no part."""

    def start(self) -> int:
        """Return the first place of the match."""

    def group(self) -> str:
        """Return the text of the match."""


class Matcher(Protocol):
    """A pattern, and the budget within which it is matched. For one thread."""

    def found_in(self, text: str) -> bool:
        """Return True if the pattern matches anywhere in ``text``. Raises PatternTimeoutError."""

    def matches(self, text: str) -> Sequence[Match]:
        """Return all matches in ``text`` that don't overlap. Raises PatternTimeoutError."""


@dataclass(frozen=True, slots=True)
class UserPattern:
    """A checked regular expression."""

    text: str = field(repr=False)
    linear: LinearPattern | None = field(default=None, repr=False, compare=False)
    """The pattern for RE2; None if `regex` matches it."""

    def matcher(self, budget: Budget | None = None) -> Matcher:
        """Return a matcher within ``budget``; by default within that of one transform call."""
        budget = Budget(MATCH_BUDGET_S) if budget is None else budget
        if self.linear is not None:
            return _LinearMatcher(self.linear, budget)
        return _BacktrackingMatcher(_compiled(self.text), budget)

    def matches_nothing(self) -> bool:
        """Return True if it matches within empty text. Raises PatternTimeoutError."""
        return self.linear is None and self.matcher().found_in("")


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


class _LinearMatcher:
    def __init__(self, pattern: LinearPattern, budget: Budget) -> None:
        self._pattern = pattern
        self._budget = budget

    def found_in(self, text: str) -> bool:
        self._check(text)
        return self._pattern.is_in(text)

    def matches(self, text: str) -> Sequence[Match]:
        self._check(text)
        found: list[Match] = []
        # Each search takes time in proportion to what is left of the text; many may take too long.
        for match in self._pattern.matches(text):
            self._budget.check()
            found.append(match)
        return found

    def _check(self, text: str) -> None:
        self._budget.check()
        if not self._pattern.is_in_reach(text):
            raise PatternTimeoutError("the text is too long for a pattern of this size")


class _BacktrackingMatcher:
    def __init__(self, pattern: Any, budget: Budget) -> None:
        self._pattern = pattern
        self._budget = budget

    def found_in(self, text: str) -> bool:
        return self._within(lambda limit: self._pattern.search(text, timeout=limit) is not None)

    def matches(self, text: str) -> Sequence[Match]:
        def all_of(limit: float) -> list[Match]:
            found: list[Match] = []

            def note(match: Match) -> str:
                found.append(match)
                return ""

            # Faster than `finditer`, above all if there is nothing to find.
            self._pattern.sub(note, text, timeout=limit)
            return found

        return self._within(all_of)

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
    from leyline_policies.builtin.linear_pattern import NotLinearError, linear_pattern

    with _named(pattern):
        try:
            return UserPattern(pattern, linear_pattern(pattern))
        except NotLinearError:  # `regex` may know it
            pass
        re.compile(pattern)
        if _LITERAL.fullmatch(pattern) is None:  # any other may fail or blow up in `regex`
            _check_size(pattern)
            _compiled(pattern)
    return UserPattern(pattern)


def linear_size(pattern: str) -> int:
    """Return the size of the program of a pattern that is matched in linear time.

    Raises ValueError, which names the construct that can't be; or says what else is wrong.
    """
    from leyline_policies.builtin.linear_pattern import NotLinearError, linear_pattern

    with _named(pattern):
        try:
            return linear_pattern(pattern).size
        except NotLinearError as error:
            raise ValueError(
                f"pattern={shown(pattern)} can't be matched in linear time: {error}; patterns of "
                "requests must be (an operator's need not)"
            ) from error


@contextmanager
def _named(pattern: str) -> Iterator[None]:
    """Turn the errors of a parser into a ValueError that names the pattern."""
    if not pattern:
        raise ValueError("pattern is empty; it would match everywhere")
    try:
        yield
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"pattern={shown(pattern)} is no regular expression: {error}") from error


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
