"""A count of evicted text that a model writes again, word for word.

Texts are compared with each run of white space as one space. A *window* is 32 consecutive
characters. A character of a text is

- *evicted* if no window around it is in a text of the prompt that is sent after the eviction;
- *quoted* if it is evicted, and a window around it is in what the model wrote later, and in no text
  of the prompt from which it wrote that: the model can't have copied it from there.

So a text that is elsewhere in the prompt, or that the model only repeats from its own last words,
counts neither way, and texts of fewer than 32 characters don't count at all. Where text repeats
itself, only its first 32 places are compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NewType

from leyline_policies.conversation import text_of
from leyline_policies.policy import Message

WINDOW = 32
_SEED = 16
"""Characters by which equal runs are found: one of every 16 places begins a seed, so each window
holds a whole one."""
_PLACES = 32
_EFFORT = 1 << 22
"""Characters compared per call, at most."""
_BLOCK = 64

Plain = NewType("Plain", str)
"""A text as it is compared; see `plain`."""
Span = tuple[int, int]
Spans = list[Span]
"""Ascending ranges that don't touch."""


class _TooMuchError(Exception):
    """The texts repeat themselves so much that comparing them takes too long."""


@dataclass(frozen=True, slots=True)
class Quotes:
    """The counts of one evicted text, in characters."""

    evicted: int
    quoted: int


@dataclass(slots=True)
class _Text:
    text: Plain
    evicted: Spans
    quoted: Spans = field(default_factory=list)
    """The windows that the model has written."""

    @property
    def counts(self) -> Quotes:
        return Quotes(
            _size(self.evicted), _size(self.quoted) - _size(_minus(self.quoted, self.evicted))
        )


class QuoteCounter:
    """Counts the quotes of one session's evicted texts, turn by turn. Not safe for two threads.

    Args:
        max_chars: characters of texts that are remembered. The oldest leave first; their counts
            stay.
    """

    def __init__(self, max_chars: int = 1 << 20) -> None:
        self._room = max_chars
        self._texts: dict[str, _Text] = {}
        self._past: dict[str, Quotes] = {}

    @property
    def chars(self) -> int:
        """Characters of the texts that are remembered."""
        return sum(len(each.text) for each in self._texts.values())

    def evict(self, name: str, text: Plain, prompt: Iterable[Plain]) -> Quotes:
        """Note that a text was evicted, or that more of it was.

        Args:
            name: the text's name, such as its address.
            prompt: the texts of the prompt that is sent after the eviction.
        """
        known = self._texts.pop(name, None)
        try:
            held = _union(_runs(text, prompt, _Effort()))
        except _TooMuchError:
            held = [(0, len(text))]
        evicted = _minus([(0, len(text))], held) if len(text) >= WINDOW else []
        made = self._texts[name] = _Text(text, evicted, known.quoted if known is not None else [])
        size = self.chars
        while size > self._room:
            oldest = next(iter(self._texts))
            left = self._texts.pop(oldest)
            self._past[oldest] = left.counts
            size -= len(left.text)
        return made.counts

    def forget(self, name: str) -> None:
        """Drop a text and its counts."""
        self._texts.pop(name, None)
        self._past.pop(name, None)

    def wrote(self, texts: Sequence[Plain], prompt: Iterable[Plain]) -> dict[str, int]:
        """Note what the model has written; return the newly quoted characters by name.

        Args:
            texts: what it wrote on this turn.
            prompt: the texts of the prompt from which it did; only read if any text is quoted.
        """
        prompts: tuple[Plain, ...] | None = None
        fresh: dict[str, int] = {}
        for text in texts:
            effort = _Effort()
            try:
                found = self._found(text, effort)
                if not found:
                    continue
                prompts = tuple(prompt) if prompts is None else prompts
                held = _starts(_runs(text, prompts, effort))
            except _TooMuchError:
                continue
            for name, matches in found.items():
                more = self._quote(self._texts[name], matches, held)
                if more:
                    fresh[name] = fresh.get(name, 0) + more
        return fresh

    def counts(self) -> dict[str, Quotes]:
        """Return the counts of each text."""
        return {**self._past, **{name: each.counts for name, each in self._texts.items()}}

    def _found(self, text: Plain, effort: _Effort) -> dict[str, list[_Match]]:
        seeds = _seeds(text)
        found = {
            name: [*_matches(text, seeds, each.text, effort)]
            for name, each in self._texts.items()
            if each.evicted
        }
        return {name: matches for name, matches in found.items() if matches}

    @staticmethod
    def _quote(known: _Text, matches: Iterable[_Match], held: Spans) -> int:
        """Mark windows of a text as quoted; return the newly quoted characters."""
        before = known.counts.quoted
        windows: Spans = []
        for at, place, size in matches:
            own = _minus([(at, at + size - WINDOW + 1)], held)
            windows += [(begin - at + place, end - at + place + WINDOW - 1) for begin, end in own]
        known.quoted = _union([*known.quoted, *windows])
        return known.counts.quoted - before


def plain(text: str) -> Plain:
    """Return a text with each run of white space as one space."""
    return Plain(" ".join(text.split()))


def texts_in(message: Message) -> Iterator[Plain]:
    """Yield the texts of a message: its own, its reasoning, and each text in a call's arguments."""
    yield plain(text_of(message))
    yield plain(str(message.get("reasoning_content") or ""))
    called = [*(message.get("tool_calls") or ()), {"function": message.get("function_call")}]
    for call in called:
        body = (call.get("function") or call.get("custom")) if isinstance(call, dict) else None
        if isinstance(body, dict):
            yield from map(plain, _leaves(_decoded(body.get("arguments") or body.get("input"))))


def _decoded(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments


def _leaves(value: Any) -> Iterator[str]:
    """Yield the texts in decoded JSON."""
    todo = [value]
    while todo:
        value = todo.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            todo += value.values()
        elif isinstance(value, list):
            todo += value


class _Effort:
    """A budget of the characters that one call compares."""

    def __init__(self) -> None:
        self._left = _EFFORT

    def spend(self, chars: int) -> None:
        self._left -= chars
        if self._left < 0:
            raise _TooMuchError


_Match = tuple[int, int, int]
"""Where a run is in a text, where in another, and its length."""


def _seeds(text: Plain) -> dict[str, list[int]]:
    """Return places in a text by the seed that begins there."""
    seeds: dict[str, list[int]] = {}
    for at in range(len(text) - _SEED + 1):
        places = seeds.setdefault(text[at : at + _SEED], [])
        if len(places) < _PLACES:
            places.append(at)
    return seeds


def _matches(
    text: Plain, seeds: dict[str, list[int]], other: Plain, effort: _Effort
) -> Iterator[_Match]:
    """Yield the longest equal runs of a text and another, of a window or more."""
    done: dict[int, int] = {}
    for place in range(0, len(other) - _SEED + 1, _SEED):
        for at in seeds.get(other[place : place + _SEED], ()):
            if done.get(place - at, 0) > place:
                continue
            before = _equal_before(text, other, at, place)
            after = _equal_after(text, other, at, place)
            effort.spend(before + after)
            done[place - at] = place + after
            if before + after >= WINDOW:
                yield at - before, place - before, before + after


def _equal_before(text: str, other: str, at: int, place: int) -> int:
    """Return how many characters before two places are equal; a seed more would be found."""
    size = 0
    while size < min(at, place) and text[at - size - 1] == other[place - size - 1]:
        size += 1
    return size


def _equal_after(text: str, other: str, at: int, place: int) -> int:
    size, most = 0, min(len(text) - at, len(other) - place)
    while size < most:
        step = min(_BLOCK, most - size)
        here, there = at + size, place + size
        if text[here : here + step] != other[there : there + step]:
            break
        size += step
    while size < most and text[at + size] == other[place + size]:
        size += 1
    return size


def _runs(text: Plain, others: Iterable[Plain], effort: _Effort) -> Spans:
    """Return the longest runs of a text that others hold, which may overlap."""
    seeds = _seeds(text)
    found = (match for other in others for match in _matches(text, seeds, other, effort))
    return [(at, at + size) for at, _, size in found]


def _starts(runs: Iterable[Span]) -> Spans:
    """Return where windows begin that lie within runs."""
    return _union((begin, end - WINDOW + 1) for begin, end in runs)


def _size(spans: Spans) -> int:
    return sum(end - begin for begin, end in spans)


def _union(spans: Iterable[Span]) -> Spans:
    merged: Spans = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        elif begin < end:
            merged.append((begin, end))
    return merged


def _minus(spans: Iterable[Span], holes: Spans) -> Spans:
    """Return ``spans`` without ``holes``."""
    left: Spans = []
    for begin, end in spans:
        inside = [hole for hole in holes if hole[0] < end and begin < hole[1]]
        edges = [(begin, begin), *inside, (end, end)]
        left += [(low[1], high[0]) for low, high in pairwise(edges) if low[1] < high[0]]
    return left
