"""Leyline's own notes, added after a message's content."""

from __future__ import annotations

from leyline_policies.marks import edit
from leyline_policies.policy import Message


def with_note(message: Message, note: str, *, cause: str) -> Message:
    """Return the message with ``note`` after its content."""
    content = message.get("content")
    if isinstance(content, list):
        return edit(message, content=[*content, {"type": "text", "text": note}], cause=cause)
    text = content if isinstance(content, str) else ""
    return edit(message, content=f"{text}\n\n{note}" if text else note, cause=cause)
