"""Bounds of the kept part of an engine's answer."""

from __future__ import annotations

from dataclasses import dataclass

import httpx

EXTENSION = "leyline.answer_bounds"
"""Name in a request's extensions."""


@dataclass(frozen=True, slots=True)
class AnswerBounds:
    """Largest numbers of bytes of an engine's answer kept at a time."""

    answer: int = 64 * 1024 * 1024
    """Bytes of an answer that is read whole."""
    event: int = 8 * 1024 * 1024
    """Bytes of one event of a stream."""


def bounds_of(response: httpx.Response) -> AnswerBounds:
    """Return the bounds of a response."""
    found = response.request.extensions.get(EXTENSION)
    return found if isinstance(found, AnswerBounds) else AnswerBounds()
