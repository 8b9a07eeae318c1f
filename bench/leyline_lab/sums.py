"""Counts that add up, field by field."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self


@dataclass(frozen=True, slots=True)
class Sums:
    """A base of dataclasses whose fields are all numbers, 0 by default."""

    def __add__(self, other: Self) -> Self:
        """Return the sums of both."""
        names = (each.name for each in fields(self))
        return type(self)(**{name: getattr(self, name) + getattr(other, name) for name in names})
