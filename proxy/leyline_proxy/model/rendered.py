"""A prompt as tokens, with the place of each message's content."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    TokenIds = array[int]
else:  # stores read this annotation as they run, and Python 3.11 can't subscript the class
    TokenIds = array


class MessageSpan(NamedTuple):
    """Tokens ``[start, end)`` of the prompt hold the content of message ``message``."""

    message: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Rendered:
    """One rendered prompt."""

    tokens: TokenIds
    """Signed 64-bit token ids."""
    spans: tuple[MessageSpan, ...]
    """Sorted and disjoint; a message whose content can't be located has none."""
    context: str = ""
    """Digest of the prompt's other inputs: tool definitions and template options."""
