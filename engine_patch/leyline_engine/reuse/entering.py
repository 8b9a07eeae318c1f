"""Entries of the index on their way into it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from leyline_engine.sources import SourceTurn

Slots = NDArray[np.int64]


@dataclass(slots=True, eq=False)
class Path:
    """Tokens that entries point into: those of a session's turn, and of turns that continue it."""

    source: SourceTurn
    anchors: set[int] = field(default_factory=set)
    """Slots of its entries."""
    done: int = 0
    """Number of leading tokens whose entries are in the index, of this path or another."""


class Entry(NamedTuple):
    """The place of a hash."""

    path: Path
    position: int
    value: int


class Enters(Protocol):
    """Takes entries; one tenant's part of the index."""

    def enter(self, slot: int, entry: Entry) -> None: ...


@dataclass(slots=True, eq=False)
class Entering:
    """Entries of one path that are being entered, in the order of their positions."""

    tenant: Enters
    path: Path
    anchors: Slots
    positions: Slots
    values: NDArray[np.uint64]
    uses: NDArray[np.uint32]
    """Of each anchor, the number of times that it had been freed."""
    done: int = 0

    def keep(self, mask: NDArray[np.bool_]) -> None:
        """Drop the entries that weren't entered, but for those of a mask."""
        rest = slice(self.done, None)
        self.anchors, self.positions = self.anchors[rest][mask], self.positions[rest][mask]
        self.values, self.uses = self.values[rest][mask], self.uses[rest][mask]
        self.done = 0
