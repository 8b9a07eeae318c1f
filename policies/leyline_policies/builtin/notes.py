"""Words of Leyline's own, put behind what a message says."""

from __future__ import annotations

from leyline_policies.marks import edit
from leyline_policies.policy import Message

BEARERS = frozenset({"user", "tool", "function"})
"""Roles of messages that a note may go into: what the model answers to, never what it said."""


def with_note(message: Message, note: str, *, cause: str) -> Message:
    """The message with ``note`` behind its content."""
    content = message.get("content")
    if isinstance(content, list):
        return edit(message, content=[*content, {"type": "text", "text": note}], cause=cause)
    text = content if isinstance(content, str) else ""
    return edit(message, content=f"{text}\n\n{note}" if text else note, cause=cause)
