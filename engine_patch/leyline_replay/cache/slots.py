"""Slots of a KV pool: their numbers, and who has them. Without tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Slots = npt.NDArray[np.int64]


class PoolExhaustedError(Exception):
    """There are too few slots, and nothing left to evict: retry when a request has finished."""


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Slots by owner."""

    capacity: int
    free: int
    cached: int
    doomed: int
    in_flight: int


class SlotAllocator:
    """Allocator of slot numbers ``[0, capacity)``; each is owned once."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free: Slots = np.arange(capacity, dtype=np.int64)
        self._top = capacity

    @property
    def free_count(self) -> int:
        return self._top

    def free_slots(self) -> Slots:
        """Return the free slot numbers, in no particular order."""
        return self._free[: self._top].copy()

    def allocate(self, count: int) -> Slots | None:
        """Return ``count`` slots, or None if fewer are free."""
        if count > self._top:
            return None
        self._top -= count
        return self._free[self._top : self._top + count].copy()

    def release(self, slots: Slots) -> None:
        """Free slots; a slot that is free already is a bug of the caller."""
        if self._top + len(slots) > self.capacity:
            raise RuntimeError("more slots released than were allocated")
        self._free[self._top : self._top + len(slots)] = slots
        self._top += len(slots)
