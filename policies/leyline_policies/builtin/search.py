"""Looking for what several rules find, within one budget of time."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

from leyline_policies.builtin.detectors import Rule, Span
from leyline_policies.builtin.patterns import MATCH_BUDGET_S, Matcher, PatternTimeoutError

_SHARE = 4
_Found = tuple[int, Rule, Collection[re.Match[str]]]


class Search:
    """The rules of one transform call and what is left of its time. For one thread.

    Args:
        patient: whether a single text may use up all of the time, or a quarter of it.
    """

    def __init__(self, rules: Sequence[Rule], *, patient: bool = True) -> None:
        self._rules = rules
        self._share_s = MATCH_BUDGET_S if patient else MATCH_BUDGET_S / _SHARE
        self._left_s = MATCH_BUDGET_S
        self._spent_s = 0.0
        self._matchers: dict[int, Matcher] = {}

    def begin(self) -> None:
        """A new message: it has its own share of the time."""
        self._spent_s = 0.0
        self._matchers.clear()

    def exhausts(self) -> bool:
        """Whether the message at hand used up its share by itself."""
        return self._spent_s >= self._share_s

    def redacted(self, text: str, replacement: str) -> str:
        """``text`` with ``replacement`` for what the rules find. Raises PatternTimeoutError."""
        parts: list[str] = []
        at = 0
        for start, end in _merged(self.spans(text, replacement)):
            parts += (text[at:start], replacement)
            at = end
        return "".join((*parts, text[at:])) if parts else text

    def spans(self, text: str, replacement: str = "") -> list[Span]:
        """What the rules find, in order. Raises PatternTimeoutError.

        What lies within an earlier ``replacement`` is left, or the text would grow on every turn.
        """
        found = [span for _, rule, matches in self._matches(text) for span in _of(rule, matches)]
        return sorted(span for span in found if not _inside(text, span, replacement))

    def first(self, text: str) -> int | None:
        """Which of the rules is the first that finds something. Raises PatternTimeoutError."""
        for place, rule, matches in self._matches(text):
            if any(_of(rule, matches)):
                return place
        return None

    def _matches(self, text: str) -> Iterator[_Found]:
        """What each rule finds, in their order, where it finds anything."""
        found: dict[Span, re.Match[str]] = {}

        def note(match: re.Match[str]) -> str:
            # By place, for matching may begin anew when the machine is busy.
            found[match.span()] = match
            return match.group()

        small = in_small_letters(text)
        for place, rule in enumerate(self._rules):
            if not rule.may_match(small):
                continue
            matcher = self._matchers.get(place)
            if matcher is None:
                matcher = self._matchers[place] = rule.pattern.matcher(self._share_s)
            if self._left_s <= 0 or self._spent_s >= self._share_s:
                raise PatternTimeoutError("the patterns take too long on this conversation")
            before = matcher.left_s
            try:
                matcher.replaced(text, note)
            finally:
                self._left_s -= before - matcher.left_s
                self._spent_s += before - matcher.left_s
            if found:
                yield place, rule, [*found.values()]
                found.clear()


def in_small_letters(text: str) -> str:
    """The text in which whatever a pattern takes for a letter a to z, case aside, is that letter.

    Besides capitals that are the long s, the Kelvin sign, and i with and without a dot. All else
    outside ASCII is a question mark.
    """
    if not text.isascii():
        for letter, other in (("s", "\u017f"), ("k", "\u212a"), ("i", "\u0130"), ("i", "\u0131")):
            text = text.replace(other, letter)
        text = text.encode("ascii", "replace").decode("ascii")
    return text.lower()


def _of(rule: Rule, matches: Collection[re.Match[str]]) -> Iterator[Span]:
    return (span for match in matches for span in rule.spans(match) if span[0] < span[1])


def _inside(text: str, span: Span, replacement: str) -> bool:
    size = len(replacement)
    if not size or span[1] - span[0] > size:
        return False
    return text.find(replacement, max(0, span[1] - size), span[0] + size) >= 0


def _merged(spans: Sequence[Span]) -> Iterator[Span]:
    """The spans, those that overlap as one."""
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
