"""Entries of the index on their way into it, and out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from leyline_engine.reuse.winnowing import GRAM
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
    heir: Path | None = None
    """The path that takes its beginning over, once its turn isn't retained any more; itself if
    none does."""
    inherited: int = 0
    """Number of leading tokens that the heir takes over."""

    def place(self, position: int, length: int) -> Path | None:
        """Return the path whose turn has ``length`` tokens from a position on; None if none has."""
        path = self
        while path.heir is not None:
            if position + length > path.inherited:
                return None
            path = path.heir
        return path


class Entry(NamedTuple):
    """The place of a hash."""

    path: Path
    position: int
    value: int


class Enters(Protocol):
    """One tenant's part of the index."""

    def enter(self, slot: int, entry: Entry) -> None: ...
    def bequeath(self, slot: int) -> None: ...
    def free(self, slot: int) -> None: ...


@dataclass(slots=True, eq=False)
class Entering:
    """Entries of one path that are being entered, in the order of their positions."""

    tenant: Enters
    path: Path
    anchors: Slots
    positions: Slots
    values: NDArray[np.uint64]
    done: int = 0

    def work(self, count: int) -> bool:
        """Enter the next ones; returns False if none is left."""
        part = slice(self.done, self.done + count)
        for slot, position, value in zip(
            self.anchors[part].tolist(),
            self.positions[part].tolist(),
            self.values[part].tolist(),
            strict=True,
        ):
            path = self.path.place(position, GRAM)
            if path is not None:
                self.tenant.enter(slot, Entry(path, position, value))
        self.done = part.stop
        return self.done < len(self.anchors)


@dataclass(slots=True, eq=False)
class Leaving:
    """A path whose entries are being dropped, or given to its heir."""

    tenant: Enters
    path: Path

    def work(self, count: int) -> bool:
        """Drop the next ones; returns False if none is left."""
        anchors = self.path.anchors
        for _ in range(min(count, len(anchors))):
            self.tenant.bequeath(anchors.pop())
        return bool(anchors)


@dataclass(slots=True, eq=False)
class Freeing:
    """Slots that were freed, and whose entries are being dropped."""

    tenants: Mapping[str, Enters]
    slots: Slots
    done: int = 0

    def work(self, count: int) -> bool:
        """Drop the next ones; returns False if none is left."""
        part = slice(self.done, self.done + count)
        for slot in self.slots[part].tolist():
            for tenant in self.tenants.values():
                tenant.free(slot)
        self.done = part.stop
        return self.done < len(self.slots)
