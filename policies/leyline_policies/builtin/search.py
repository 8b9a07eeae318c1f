"""The search for the matches of several rules, within a time that grows with the text."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from operator import itemgetter

from leyline_policies.builtin.detectors import Rule, Span
from leyline_policies.builtin.escapes import View, views
from leyline_policies.builtin.patterns import (
    MATCH_BUDGET_S,
    Budget,
    Matcher,
    PatternTimeoutError,
)

_SHARE = 4
_LEAST_S = 0.01
_CHARACTER_S = 1e-6
_RULE_S = 5e-8
"""Seconds for each character, and more for each rule. Ordinary text takes a tenth of it."""
_CLOSER_S = 2e-4
_MOST_CLOSER = 5_000
"""Seconds for each match that is examined, and the maximum number of such matches in a message."""
_MOST_GROWTH = 4
_GROWTH_CHARS = 65_536
"""Maximum length of the replacements in a text: so many times its own, and characters."""


class Search:
    """The rules of one transform call. For one thread.

    Each message has the processor time that its length is worth, many times over what ordinary text
    takes, so that its own text decides if it can be searched, and the same on every turn. Besides,
    it may take a quarter of a common reserve; once that is spent, each has only its own.
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = rules
        self._character_s = _CHARACTER_S + _RULE_S * len(rules)
        self._shared_s = MATCH_BUDGET_S
        self._matchers: dict[int, Matcher] = {}
        self._lent_s = 0.0
        self._budget = Budget(0.0)
        self._closer = 0
        self.begin()

    def begin(self) -> None:
        """Begin a new message, which has its own time."""
        self._shared_s -= min(self._lent_s, max(0.0, self._lent_s - self._budget.left_s))
        self._lent_s = min(self._shared_s, MATCH_BUDGET_S / _SHARE)
        self._budget = Budget(_LEAST_S + self._lent_s)
        self._closer = 0
        self._matchers.clear()

    def redacted(self, text: str, replacement: str) -> str:
        """Return ``text`` with ``replacement`` for each match. Raises PatternTimeoutError."""
        return replaced(text, self.spans(text, replacement), replacement)

    def spans(self, text: str, replacement: str = "") -> list[Span]:
        """Return the matches, in order and without overlaps. Raises PatternTimeoutError.

        Matches within an earlier ``replacement`` are left, or the text would grow on every turn.
        """
        found: list[Span] = []
        levels = [*views(text)]
        for view in reversed(levels):
            known = [*_merged(sorted(found))]
            for _, span in self._found(view):
                has_escapes = view is levels[0] and len(levels) > 1
                start, end = _uncut(span, levels[1], known) if has_escapes else span
                if start < end and not _inside(text, (start, end), replacement):
                    found.append((start, end))
        if len(found) * len(replacement) > _MOST_GROWTH * len(text) + _GROWTH_CHARS:
            raise PatternTimeoutError("what is found would become too long")
        return [*_merged(sorted(found))]

    def first(self, text: str) -> int | None:
        """Return the number of the first rule that matches. Raises PatternTimeoutError."""
        return next((place for view in views(text) for place, _ in self._found(view)), None)

    def _found(self, view: View) -> Iterator[tuple[int, Span]]:
        """Yield the matches of each rule, in order, as places in the text as it is written."""
        self._budget.extend(len(view.text) * self._character_s)
        small = in_small_letters(view.text)
        for place, rule in enumerate(self._rules):
            if not rule.may_match(small):
                continue
            matcher = self._matchers.get(place)
            if matcher is None:
                matcher = self._matchers[place] = rule.pattern.matcher(self._budget)
            for match in matcher.matches(view.text):
                self._look_closer(rule)
                for start, end in rule.spans(match):
                    if start < end:
                        yield place, view.original(start, end)

    def _look_closer(self, rule: Rule) -> None:
        """Raise PatternTimeoutError if there is no time for a closer look."""
        if rule.narrow is not None and self._closer < _MOST_CLOSER:
            self._closer += 1
            self._budget.extend(_CLOSER_S)
        self._budget.check()


def replaced(text: str, spans: Sequence[Span], replacement: str) -> str:
    """Return ``text`` with ``replacement`` for each of the spans, which are in order and apart."""
    parts: list[str] = []
    at = 0
    for start, end in spans:
        parts += (text[at:start], replacement)
        at = end
    return "".join((*parts, text[at:])) if parts else text


def in_small_letters(text: str) -> str:
    """Return the text with small letters a to z for all that patterns take for them, case aside.

    Besides capitals, those are the long s, the Kelvin sign, and i with and without a dot. All else
    outside ASCII is a question mark.
    """
    if not text.isascii():
        for letter, other in (("s", "\u017f"), ("k", "\u212a"), ("i", "\u0130"), ("i", "\u0131")):
            text = text.replace(other, letter)
        text = text.encode("ascii", "replace").decode("ascii")
    return text.lower()


def _inside(text: str, span: Span, replacement: str) -> bool:
    size = len(replacement)
    if not size or span[1] - span[0] > size:
        return False
    return text.find(replacement, max(0, span[1] - size), span[0] + size) >= 0


def _uncut(span: Span, read: View, known: Sequence[Span]) -> Span:
    """Return the span without a cut escape at its start: the n of a line break is no letter.

    Args:
        read: the text with its escapes undone.
        known: matches in it already; a known match need not be removed twice, nor grow.
    """
    start, end = span
    cut = read.escape_at(start)
    if cut is None:
        return span
    at = bisect_right(known, cut[1], key=itemgetter(0)) - 1
    return (end, end) if at >= 0 and known[at][1] >= end else (cut[0], end)


def _merged(spans: Sequence[Span]) -> Iterator[Span]:
    """Yield the spans, with those that overlap as one."""
    held: Span | None = None
    for start, end in spans:
        if held is None or start >= held[1]:
            if held is not None:
                yield held
            held = start, end
        else:
            held = held[0], max(held[1], end)
    if held is not None:
        yield held
