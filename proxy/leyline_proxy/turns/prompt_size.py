"""Sizes of prompts for budgets: by tokens where they can be counted, else by their bytes. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from leyline_policies.context import is_picture, picture_tokens, texts_of

from ..model.messages import Message

BYTES_PER_TOKEN = 4
"""Bytes of a text that can't be counted in tokens, that are charged as one."""

_FRAME_TOKENS = 3
_COUNTED = frozenset({"role", "content", "reasoning_content", "tool_calls", "function_call"})
"""Members of a message whose texts :func:`texts_of` yields."""

_UNREAD = frozenset(
    {
        "leyline",
        "metadata",
        "model",
        "prompt_cache_key",
        "safety_identifier",
        "service_tier",
        "stream_options",
        "user",
    }
)
"""Members of a request that no model reads."""

TokenCounter = Callable[[Message], int]


def bytes_size(raw: bytes) -> int:
    """Return the tokens that bytes are charged as; a list of ids as one for each of them."""
    return max(-(-len(raw) // BYTES_PER_TOKEN), raw.count(b",") + 1) if raw else 0


def text_size(text: str) -> int:
    """Return the tokens that a text is charged as."""
    return -(-len(text.encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN)


def message_size(message: Message, count: TokenCounter | None) -> int:
    """Return the tokens that a message is charged as, pictures and further members included.

    Args:
        count: counts what a template writes of a message, and pictures; None if its tokenizer is
            unknown.
    """
    if count is not None:
        known = count(message)
    else:
        known = text_size("".join(texts_of(message))) + _FRAME_TOKENS + picture_tokens(message)
    return known + document_size([*_uncounted(message)])


def members_size(body: Mapping[str, Any], *, but: Collection[str]) -> int:
    """Return the tokens that a request's other members are charged as: tools, formats, documents.

    Args:
        but: members that are counted elsewhere.
    """
    return sum(
        document_size(value)
        for name, value in body.items()
        if name not in but and name not in _UNREAD and isinstance(value, str | list | dict)
    )


def _uncounted(message: Message) -> Iterator[object]:
    """Yield what a message has beside the texts that are counted."""
    yield from (value for name, value in message.items() if name not in _COUNTED and value)
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list):
        yield from (part for part in content if not _is_text(part) and not is_picture(part))
    elif content is not None and not isinstance(content, str):
        yield content
    for call in calls if isinstance(calls, list) else ():
        if not isinstance(call, dict) or not (call.get("function") or call.get("custom")):
            yield call


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def document_size(value: object) -> int:
    """Return the tokens that a JSON value is charged as; 0 for none."""
    if not value:
        return 0
    text = json.dumps(value, ensure_ascii=False, default=str)
    return bytes_size(text.encode("utf-8", "surrogatepass"))
