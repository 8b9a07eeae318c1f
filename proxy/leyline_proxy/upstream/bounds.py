"""How much of an engine's answer is kept."""

from __future__ import annotations

from dataclasses import dataclass

import httpx

EXTENSION = "leyline.answer_bounds"
"""Name among a request's extensions."""


@dataclass(frozen=True, slots=True)
class AnswerBounds:
    """Bytes of an engine's answer that are kept at a time."""

    answer: int = 64 * 1024 * 1024
    """Of one that is read whole."""
    event: int = 8 * 1024 * 1024
    """Of one event of a stream."""


def bounds_of(response: httpx.Response) -> AnswerBounds:
    """What may be kept of a response."""
    found = response.request.extensions.get(EXTENSION)
    return found if isinstance(found, AnswerBounds) else AnswerBounds()
