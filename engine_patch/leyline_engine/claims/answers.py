"""Answers of the book: effects on the cache, a claim's state, and refusals. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .events import Run
from .protection import ClaimKey


class UnknownClaimError(LookupError):
    """There is no such claim, or it is another tenant's: the answer is the same."""

    def __init__(self) -> None:
        super().__init__("no claim has this id")


class TickError(ValueError):
    """A message of the clock is missing, doubled or runs backwards; nothing was changed."""


class Change(StrEnum):
    """A change that the cache has to make to pages."""

    LOCK = "lock"
    UNLOCK = "unlock"
    RANK = "rank"
    UNRANK = "unrank"


@dataclass(frozen=True, slots=True)
class Effect:
    """One claim's change to pages. Locks add up; of ranks, the highest counts."""

    change: Change
    claim: ClaimKey
    runs: tuple[Run, ...]
    priority: int = 0
