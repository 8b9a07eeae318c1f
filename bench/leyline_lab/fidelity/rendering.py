"""Prompts as tokens with the place of each message, and the directives between two of them."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leyline_engine.contract import Directive, DirectiveError, Mode, apply_directives, common_prefix

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as tokens."""

    tokens: array[int]
    contents: tuple[Span | None, ...]
    """Tokens of each message's content, ``[start, end)``; None if the text doesn't show it as is.
    The first and last of them may also hold characters around it."""


def place_contents(
    text: str,
    messages: Sequence[Mapping[str, Any]],
    tokens: Sequence[int],
    offsets: Sequence[Span],
) -> Rendered:
    """Return a rendered conversation with the place of each content.

    Args:
        text: the whole conversation.
        tokens: ids of the text.
        offsets: characters ``[start, end)`` of each token.
    """
    starts = [start for start, _ in offsets]
    ends = [end for _, end in offsets]
    contents: list[Span | None] = []
    cursor = 0
    for message in messages:
        content = message.get("content")
        found = text.find(content, cursor) if isinstance(content, str) and content else -1
        if found < 0:
            contents.append(None)
            continue
        cursor = found + len(content or "")
        contents.append((bisect_right(ends, found), bisect_left(starts, cursor)))
    return Rendered(array("q", tokens), tuple(contents))


def edits_between(before: Rendered, after: Rendered) -> tuple[Directive, ...]:
    """Return directives that make the second prompt of the first; none if they are equal.

    One for each content that differs. A single one is returned if anything else differs, as under
    a template that shows a message in another way because of a later one.
    """
    edits: list[Directive] = []
    if len(before.contents) == len(after.contents):
        for old, new in zip(before.contents, after.contents, strict=True):
            if old and new:
                edits += _edit(before.tokens, old, after.tokens[slice(*new)])
    if _makes(before.tokens, edits, after.tokens):
        return tuple(edits)
    return tuple(_edit(before.tokens, (0, len(before.tokens)), after.tokens))


def edit_of_extension(before: Rendered, after: Rendered) -> Directive | None:
    """Return the edit that makes the beginning of a longer conversation of a shorter one.

    A template may show a message in another way once others follow it, as most do with thinking.
    Of all edits that leave the shorter one's end as it is, this is the smallest.

    Returns:
        None if the template shows the shorter conversation as it was, or nothing of its end.
    """
    source, target = before.tokens, after.tokens
    head = common_prefix(source, target)
    for end in range(head + 1, len(source)):
        if source[end:] == target[head : head + len(source) - end]:
            return Directive(head, end, (), Mode.AMORTIZE)
    return None


def _makes(source: array[int], edits: Sequence[Directive], wanted: array[int]) -> bool:
    try:
        return array("q", apply_directives(source, edits)) == wanted
    except DirectiveError:  # a short text was found in front of its place
        return False


def _edit(source: array[int], span: Span, replacement: array[int]) -> list[Directive]:
    """Return the edit of a span without the tokens that both begin or end with."""
    start, end = span
    old = source[start:end]
    if old == replacement:
        return []
    head = common_prefix(old, replacement)
    old, new = old[head:], replacement[head:]
    tail = common_prefix(old[::-1], new[::-1])
    kept = tuple(new[: len(new) - tail])
    return [Directive(start + head, end - tail, kept, Mode.AMORTIZE)]
