"""Edits of a message's text, across its content parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
    if not text and spans:  # there may be no part that could hold it
        return replace_text(message, "".join(replacement for _, _, replacement in spans))
    if isinstance(content, str):
        return {**message, "content": apply_chars(content, [CharEdit(*span) for span in spans])}
    return {**message, "content": _edit_parts(content if isinstance(content, list) else [], spans)}


def replace_text(message: Message, text: str) -> Message:
    """Return ``message`` with ``text`` as its whole text; parts of other kinds remain."""
    content = message.get("content")
    if not isinstance(content, list) or not any(map(is_text_part, content)):
        rest = content if isinstance(content, list) else []
        return {**message, "content": [{"type": "text", "text": text}, *rest] if rest else text}
    return {**message, "content": _edit_parts(content, [(0, len(text_of(message)), text)])}


def _edit_parts(parts: Sequence[Any], spans: Sequence[tuple[int, int, str]]) -> list[Any]:
    """Edit the parts; a span over several puts its text into the first and empties the others."""
    result: list[Any] = []
    offset = 0
    pending = list(spans)
    for part in parts:
        if not is_text_part(part):
            result.append(part)
            continue
        text = part["text"]
        edits: list[CharEdit] = []
        later: list[tuple[int, int, str]] = []
        for start, end, replacement in pending:
            low, high = max(start - offset, 0), min(end - offset, len(text))
            if low > len(text) or (low == len(text) and end - offset > len(text)):
                later.append((start, end, replacement))
                continue
            edits.append(CharEdit(low, high, replacement))
            if end - offset > len(text):
                later.append((offset + len(text), end, ""))
        result.append({**part, "text": apply_chars(text, edits)} if edits else part)
        offset += len(text)
        pending = later
    return result
