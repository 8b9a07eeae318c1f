"""Parts of other providers in the history of a chat request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..model.messages import Message
from .anthropic.history import BLOCKS
from .foreign import Treatment, shown_text


def shown_history(messages: Sequence[Message], known: int = 0) -> dict[int, Message]:
    """Return the assistant's messages with parts that only another provider can read, by index,
    with texts in their places. Types that no table has may be the engine's own, and stay.

    Args:
        known: number of leading messages that hold none.
    """
    found: dict[int, Message] = {}
    for index in range(known, len(messages)):
        message = messages[index]
        content = message.get("content")
        if message.get("role") != "assistant" or not isinstance(content, list):
            continue
        if any(map(_is_foreign, content)):
            parts = [shown for part in content for shown in _shown(part)]
            empty = None if message.get("tool_calls") else ""
            found[index] = {**message, "content": parts or empty}
    return found


def _is_foreign(part: Mapping[str, Any]) -> bool:
    rule = BLOCKS.get(part["type"])
    return rule is not None and rule.treatment is not Treatment.MAPPED


def _shown(part: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the parts in place of one."""
    if not _is_foreign(part):
        return (part,)
    text = shown_text(part, BLOCKS[part["type"]])
    return ({"type": "text", "text": text},) if text else ()
