"""A prompt as tokens, with the place of each message's content."""

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
    """Digest of the prompt's other inputs: tool definitions and template options."""
