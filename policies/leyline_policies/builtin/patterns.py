"""Regular expressions from settings: matched within a budget, for a request may bring its own.

Syntax is that of `re`. Matching is done by the package `regex`, which can stop in time and lets
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
"""Parts of a pattern with its repetitions written out; `regex` writes them out in memory."""

_LITERAL = re.compile(r"[\w\s-]+")
_T = TypeVar("_T")


class PatternTimeoutError(PolicyError):
    """A policy's regular expression takes too long on this conversation."""


@dataclass(frozen=True, slots=True)
class UserPattern:
    """A checked regular expression."""

    text: str = field(repr=False)

    def matcher(self, budget_s: float = MATCH_BUDGET_S) -> Matcher:
        """Matches for one transform call, which share ``budget_s`` seconds."""
        return Matcher(_compiled(self.text), budget_s)

    def matches_nothing(self) -> bool:
        """Whether it matches within empty text. Raises PatternTimeoutError."""
        return _LITERAL.fullmatch(self.text) is None and self.matcher().found_in("")


class Matcher:
    """A pattern and what is left of its budget. For one thread."""

    def __init__(self, pattern: Any, budget_s: float) -> None:
        self._pattern = pattern
        self.left_s = budget_s
        """Seconds."""

    def found_in(self, text: str) -> bool:
        """Whether the pattern matches anywhere in ``text``. Raises PatternTimeoutError."""
        return self._within(lambda limit: self._pattern.search(text, timeout=limit) is not None)

    def replaced(self, text: str, replace: Callable[[re.Match[str]], str]) -> str:
        """``text`` with each match replaced. Raises PatternTimeoutError."""
        return self._within(lambda limit: str(self._pattern.sub(replace, text, timeout=limit)))

    def _within(self, match: Callable[[float], _T]) -> _T:
        limit = self.left_s
        while self.left_s > 0:
            begun = thread_time()
            try:
                return match(limit)
            except TimeoutError:
                # The limit counts the processor time of all threads; ours may have had little
                # of it on a busy machine, and a slow match must not be mistaken for a hostile one.
                limit *= 2
            finally:
                self.left_s -= thread_time() - begun
        raise PatternTimeoutError("the regular expression takes too long on this conversation")


def compile_pattern(pattern: str) -> UserPattern:
    """Check a setting's regular expression.

    Raises ValueError that says what is wrong with it and where.
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
    """The pattern compiled by `regex`; to ask its own cache for each text takes as long as a
    search."""
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
