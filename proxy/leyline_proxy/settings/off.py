"""The word ``off``, which YAML reads as False if it is bare."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator


def _word(value: object) -> object:
    return "off" if value is False else value


OR_FALSE = BeforeValidator(_word)
"""For settings with the word ``off``: takes False for it."""

Reuse = Annotated[Literal["off", "observe", "live"], OR_FALSE]
"""The use of content that an engine holds elsewhere."""
