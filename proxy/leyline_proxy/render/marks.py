"""Location of each message's content in a rendered prompt.

The conversation is rendered a second time with private-use characters around each content. If their
removal gives exactly the plain text, they show the places of the contents, whatever the template
wrote around them. Otherwise the contents are searched in order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

_FIRST_PRIVATE, _LAST_PRIVATE = 0xE000, 0xF8FF

Render = Callable[[Sequence[Mapping[str, Any]]], str]


class CharSpan(NamedTuple):
    """Characters ``[start, end)`` of the prompt, which are the content of message ``message``."""

    message: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Found:
    """The result of reading a text's marks."""

    spans: list[CharSpan]
    """Sorted and disjoint."""
    marked: frozenset[int]
    """Messages with any mark in the text, located or not."""


def content_spans(
    messages: Sequence[Mapping[str, Any]], plain: str, render: Render
) -> list[CharSpan]:
    """Return the place of each content in ``plain``, without messages that can't be located."""
    marks = unused_characters(plain)
    if marks is not None:
        marked = render([with_marks(message, at, marks) for at, message in enumerate(messages)])
        found = read_marks(marked, marks, plain)
        if found is not None:
            return found.spans
    return unique_spans(messages, plain)


def unused_characters(text: str) -> str | None:
    """Return three characters for marks; None if the text has nearly all usable ones."""
    every = (chr(code) for code in range(_FIRST_PRIVATE, _LAST_PRIVATE + 1))
    free = list(islice((char for char in every if char not in text), 3))
    return "".join(free) if len(free) == 3 else None


def with_marks(message: Mapping[str, Any], index: int, marks: str) -> Mapping[str, Any]:
    """Return the message with its text between marks; white space at the ends stays outside."""
    before, after = f"{marks[0]}{index}{marks[1]}", f"{marks[2]}{index}{marks[1]}"
    content = message.get("content")
    if isinstance(content, str) and content.strip():
        return {**message, "content": _wrap(content, before, after)}
    if isinstance(content, list):
        return {**message, "content": _marked_parts(content, before, after)}
    return message


def _wrap(text: str, before: str, after: str) -> str:
    core = text.strip()
    start = text.index(core)
    return f"{text[:start]}{before}{core}{after}{text[start + len(core) :]}"


def _marked_parts(parts: Sequence[Any], before: str, after: str) -> list[Any]:
    """Put marks around all text parts together: before the first and after the last."""
    texts = [
        index
        for index, part in enumerate(parts)
        if isinstance(part, Mapping) and isinstance(part.get("text"), str) and part["text"].strip()
    ]
    marked = list(parts)
    if len(texts) == 1:
        only = texts[0]
        marked[only] = {**parts[only], "text": _wrap(parts[only]["text"], before, after)}
    elif texts:
        first, last = texts[0], texts[-1]
        marked[first] = {**parts[first], "text": before + parts[first]["text"]}
        marked[last] = {**parts[last], "text": parts[last]["text"] + after}
    return marked


def read_marks(marked: str, marks: str, plain: str) -> Found | None:
    """Return the places that the marks show; None if the text without them isn't ``plain``."""
    pattern = re.compile(f"[{marks[0]}{marks[2]}](\\d+){marks[1]}")
    if pattern.sub("", marked) != plain:
        return None
    opened: dict[int, int] = {}
    closed: dict[int, int] = {}
    ambiguous: set[int] = set()
    removed = 0
    for found in pattern.finditer(marked):
        index, position = int(found[1]), found.start() - removed
        removed += found.end() - found.start()
        side = opened if found[0][0] == marks[0] else closed
        if index in side:
            ambiguous.add(index)
        side[index] = position
    spans = [
        CharSpan(index, start, closed[index])
        for index, start in opened.items()
        if index in closed and index not in ambiguous and start < closed[index]
    ]
    ordered = disjoint(sorted(spans, key=lambda span: span.start))
    return Found(ordered, frozenset(opened.keys() | closed.keys()))


def unique_spans(messages: Sequence[Mapping[str, Any]], plain: str) -> list[CharSpan]:
    """Return contents that occur exactly once, and not within another: no place is better than a
    wrong one."""
    found: list[CharSpan] = []
    for index, message in enumerate(messages):
        content = message.get("content")
        core = content.strip() if isinstance(content, str) else ""
        start = plain.find(core) if core else -1
        if start >= 0 and plain.find(core, start + 1) < 0:
            found.append(CharSpan(index, start, start + len(core)))
    found.sort(key=lambda span: (span.start, -span.end))
    return disjoint(found)


def disjoint(spans: Iterable[CharSpan]) -> list[CharSpan]:
    """Return the spans, in order, that don't begin within the one before."""
    result: list[CharSpan] = []
    for span in spans:
        if not result or span.start >= result[-1].end:
            result.append(span)
    return result
