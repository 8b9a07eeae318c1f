"""Map a model's reasoning to items, and back."""

from __future__ import annotations

import binascii
from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any

from .content import Item

_CARRIED = "leyline-reasoning-1:"
"""Prefix of the proxy's own ``encrypted_content``. It hides nothing: it is the item's own text, for
clients that send back only this member."""


def reasoning_item(item_id: str, text: str, *, carried: bool, status: str) -> dict[str, Any]:
    """Return a reasoning item.

    Args:
        carried: True if the request asks for ``reasoning.encrypted_content``.
    """
    return {
        "type": "reasoning",
        "id": item_id,
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}] if text else [],
        "encrypted_content": _carry(text) if carried and text else None,
        "status": status,
    }


def reasoning_text(item: Item) -> str:
    """Return the text of a reasoning item; empty if the proxy can't read it."""
    carried = item.get("encrypted_content")
    own = _uncarry(carried) if isinstance(carried, str) else ""
    return _texts(item.get("content")) or own or _texts(item.get("summary"))


def _texts(parts: object) -> str:
    found = parts if isinstance(parts, list) else ()
    texts = (part.get("text") for part in found if isinstance(part, Mapping))
    return "".join(text for text in texts if isinstance(text, str))


def _carry(text: str) -> str:
    return _CARRIED + b64encode(text.encode("utf-8", "surrogatepass")).decode()


def _uncarry(carried: str) -> str:
    if not carried.startswith(_CARRIED):
        return ""
    try:
        raw = b64decode(carried.removeprefix(_CARRIED), validate=True)
        return raw.decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return ""
