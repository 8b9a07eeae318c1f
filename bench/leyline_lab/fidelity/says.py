"""A judge of answers: do they have a value? Pure."""

from __future__ import annotations

_AROUND = ".,;:'\"*()[]"


def says(text: str, value: str) -> bool:
    """Return True if a text has a value as a word."""
    words = text.replace("=", " ").replace("`", " ").split()
    return value in [word.strip(_AROUND) for word in words]
