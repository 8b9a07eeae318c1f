"""Messages as text for another model, and prints of what it was shown."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from leyline_policies.conversation import text_of
from leyline_policies.policy import Message


def told(message: Message) -> str:
    """Return a message as one reads it: its role, its text, its calls."""
    bodies = [
        call.get("function") or call.get("custom") or {}
        for call in message.get("tool_calls") or ()
        if isinstance(call, dict)
    ]
    calls = [
        f"{body.get('name')}({body.get('arguments') or body.get('input') or ''})"
        for body in bodies
        if isinstance(body, dict)
    ]
    return f"{message.get('role')}: " + "\n".join([text_of(message), *calls]).strip()


def clipped(text: str, chars: int) -> str:
    """Return a text, or its beginning and end with a note between them, of about ``chars``."""
    if len(text) <= chars:
        return text
    half = chars // 2
    end = text[len(text) - half :]
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters omitted ...]\n{end}"


def print_of(message: Message) -> str:
    """Return a short name of a message's whole content."""
    text = json.dumps(message, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()


def joined_print(prints: Sequence[str]) -> str:
    """Return a short name of several messages by theirs."""
    return hashlib.blake2b("".join(prints).encode(), digest_size=12).hexdigest()
