"""Edits of a message's text, across its content parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from leyline_policies.verbs import ANNOTATION, frame_of

from ..model.diff import CharEdit, apply_chars
from ..model.messages import Message, is_text_part, text_of


class TextEditError(ValueError):
    """Character spans that don't fit the message's text."""


def replace_spans(message: Message, spans: Sequence[tuple[int, int, str]]) -> Message:
    """Return ``message`` with characters ``[start, end)`` of its text replaced.

    Args:
        spans: sorted by start.

    Raises:
        TextEditError: spans overlap or reach beyond the text.
    """
    text, cursor = text_of(message), 0
    for start, end, _ in spans:
        if start < cursor or end < start or end > len(text):
            raise TextEditError("character spans overlap or reach beyond the text")
        cursor = end
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": apply_chars(content, [CharEdit(*span) for span in spans])}
    parts = content if isinstance(content, list) else []
    if spans and not any(map(is_text_part, parts)):  # only empty spans fit, and need a place
        inserted = "".join(replacement for _, _, replacement in spans)
        first = {"type": "text", "text": inserted}
        return {**message, "content": [first, *parts] if parts else inserted}
    return {**message, "content": list(_edited(parts, spans))}


def replaced(message: Message, text: str) -> Message:
    """Return ``message`` with ``text`` in place of all that it says.

    Besides, it keeps only what others need of it (:func:`~leyline_policies.verbs.frame_of`) and its
    annotation: parts, reasoning, refusals and arguments of calls are for the model to read, too.
    """
    note = {ANNOTATION: message[ANNOTATION]} if ANNOTATION in message else {}
    return {**frame_of(message), "content": text, **note}


def _edited(parts: Sequence[Any], spans: Sequence[tuple[int, int, str]]) -> Iterator[Any]:
    """Yield the parts after sorted spans, in one pass over both.

    A span over several parts puts its text into the first and empties the others.
    """
    offset, at, is_open = 0, 0, False
    for part in parts:
        if not is_text_part(part):
            yield part
            continue
        text = part["text"]
        edits: list[CharEdit] = []
        until = offset + len(text)
        while at < len(spans):
            start, end, replacement = spans[at]
            low = max(start, offset)
            if low > until or (low == until < end):
                break  # it begins in a later part
            edits.append(
                CharEdit(low - offset, min(end, until) - offset, "" if is_open else replacement)
            )
            if is_open := end > until:
                break
            at += 1
        yield {**part, "text": apply_chars(text, edits)} if edits else part
        offset = until
