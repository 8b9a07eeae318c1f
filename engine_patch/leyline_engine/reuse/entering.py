"""Entries of the index on their way into it, and out of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from leyline_engine.records.sources import SourceTurn
from leyline_engine.reuse.winnowing import GRAM

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


class Prints(NamedTuple):
    """Fingerprints of a path, ``[n]`` each, in order of position."""

    anchors: Slots
    positions: Slots
    values: NDArray[np.uint64]


@dataclass(slots=True, eq=False)
class Entering:
    """Entries of one path that are being entered, in the order of their positions."""

    tenant: Enters
    path: Path
    select: Callable[[], Prints]
    """Returns what is to be entered; the first portion of the work."""
    _prints: Prints | None = None
    done: int = 0

    def work(self, count: int) -> bool:
        """Enter the next ones; returns False if none is left."""
        if self._prints is None:
            self._prints = self.select()
            return True
        part = slice(self.done, self.done + count)
        for slot, position, value in zip(
            *(values[part].tolist() for values in self._prints),
            strict=True,
        ):
            path = self.path.place(position, GRAM)
            if path is not None:
                self.tenant.enter(slot, Entry(path, position, value))
        self.done = part.stop
        return self.done < len(self._prints.anchors)


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
    anchoring: Callable[[Slots], Slots]
    """Returns those slots that may have an entry, once what was entered before is."""
    done: int | None = None

    def work(self, count: int) -> bool:
        """Drop the next ones; returns False if none is left."""
        if self.done is None:
            self.slots, self.done = self.anchoring(self.slots), 0
        part = slice(self.done, self.done + count)
        for slot in self.slots[part].tolist():
            for tenant in self.tenants.values():
                tenant.free(slot)
        self.done = part.stop
        return self.done < len(self.slots)
