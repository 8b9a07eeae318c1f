"""A prompt as tokens, and where in it each message's content stands."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import NamedTuple


class MessageSpan(NamedTuple):
    """Tokens ``[start, end)`` of the prompt hold the content of message ``message``."""

    message: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Rendered:
    """One rendered prompt."""

    tokens: array[int]
    """Signed 64-bit token ids."""
    spans: tuple[MessageSpan, ...]
    """Sorted and disjoint; a message whose content can't be located has none."""
    context: str = ""
    """Digest of what else went into the prompt: tool definitions and template options."""
