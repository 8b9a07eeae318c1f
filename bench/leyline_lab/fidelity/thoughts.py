"""Thoughts of the recall task's assistant, and the later turns that see them. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

OPEN, CLOSE = "<think>\n", "\n</think>\n\n"


class Sight(StrEnum):
    """The later turns' view of a thought."""

    KEPT = "kept"
    """It stays in the prompt."""
    STRIPPED = "stripped"
    """Only its own turn has read it: a splice cuts it at the next message of the user."""
    NEVER = "never"
    """Nothing has read it: the prompt without it was prefilled."""


@dataclass(frozen=True, slots=True)
class Thought:
    """The thinking of one assistant's message."""

    text: str
    sight: Sight = Sight.STRIPPED

    def __str__(self) -> str:
        """Return it as the thinking model's chat template shows it."""
        return f"{OPEN}{self.text}{CLOSE}"
