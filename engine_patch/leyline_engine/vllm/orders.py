"""The scheduler's orders to the workers: what happens to rows in front of a step's forward."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Slots = NDArray[np.int64]
"""int64 ``[n]``: block id times tokens per block, plus the place in the block."""


NO_SLOTS: Slots = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class RowMove:
    """Rows to copy, in all layers, with their keys turned to new positions."""

    source: Slots
    target: Slots
    """Distinct slots, none of them in ``source``."""
    source_start: int
    """Position of the first source row; the others follow it."""
    dest_start: int
    """Position of the first target row."""


@dataclass(slots=True)
class Orders:
    """One step's orders; the workers carry them out in the order of the fields."""

    erase: Slots = field(default_factory=lambda: NO_SLOTS)
    """Rows to overwrite."""
    moves: list[RowMove] = field(default_factory=list)
    advanced: dict[str, int] = field(default_factory=dict)
    """By running request, the number of its tokens that have rows once the moves are done."""
    spoilt: list[int] = field(default_factory=list)
    """Blocks that vLLM counts on, though nobody copies their rows: they are reported as failed."""

    def __bool__(self) -> bool:
        return bool(len(self.erase) or self.moves or self.advanced or self.spoilt)


def block_slots(blocks: list[int], block: int) -> Slots:
    """Return all slots of blocks, in order.

    Args:
        blocks: their ids.
        block: tokens per block.
    """
    if not blocks:  # in most steps, for those to overwrite
        return NO_SLOTS
    first = np.asarray(blocks, dtype=np.int64)[:, None] * block
    slots: Slots = (first + np.arange(block, dtype=np.int64)).reshape(-1)
    return slots
