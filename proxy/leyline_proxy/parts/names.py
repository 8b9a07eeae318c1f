"""Names of entries in a space: digests and times, so that they reveal no text and no caller. Pure.

A name is a letter (``p`` a text, ``m`` a mark), 32 hexadecimal digits of a keyed hash of the
address (for a mark: random ones), and 12 of the time in milliseconds.
"""

from __future__ import annotations

import re
from secrets import token_hex

TEXT, MARK = "p", "m"
NAME = re.compile(r"[pm][0-9a-f]{44}")
"""Form of a name."""

Shelf = tuple[str, str]
"""Keyed hashes of a tenant, and of a tenant with a session; each of 32 hexadecimal digits."""


def text_name(tag: str, at: float) -> str:
    """Return the name of a text.

    Args:
        tag: the keyed hash of its address.
        at: seconds since the epoch.
    """
    return f"{TEXT}{tag}{millis(at):012x}"


def mark_name(at: float) -> str:
    """Return a name for a new mark."""
    return f"{MARK}{token_hex(16)}{millis(at):012x}"


def kind_of(name: str) -> str:
    """Return ``TEXT`` or ``MARK``."""
    return name[0]


def tag_of(name: str) -> str:
    """Return the keyed hash in a name."""
    return name[1:33]


def millis_of(name: str) -> int:
    """Return the time in a name, in milliseconds since the epoch."""
    return int(name[33:], 16)


def time_of(name: str) -> float:
    """Return the time in a name, in seconds since the epoch."""
    return millis_of(name) / 1000


def millis(at: float) -> int:
    """Return a time in milliseconds."""
    return round(at * 1000)
