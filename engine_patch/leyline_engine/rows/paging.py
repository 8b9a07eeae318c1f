"""Rows of slots in tensors whose blocks of slots lie apart, or whose rows aren't contiguous.

Such a tensor is seen as rows one unit apart, the greatest common divisor of the steps from slot to
slot and from block to block. Some of them begin inside other slots' rows, and those are never
touched. A slot's row is then found by its number alone, as in a tensor of one row per slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from leyline_engine.proof.digests import SlotRows


@dataclass(frozen=True, slots=True)
class Paging:
    """Places of slots among a tensor's rows; slot ``s`` is in block ``s // block``."""

    slots: int
    block: int
    """Slots per block."""
    pitch: int
    """Rows from a block's first slot to the next block's."""
    step: int
    """Rows from a slot to the next one in its block."""

    def rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the rows of slots, int64 each."""
        return slots // self.block * self.pitch + slots % self.block * self.step


class PagedRows:
    """The rows of slots in one tensor, read when they are asked for.

    Args:
        rows: ``[rows, ...]``; a view of the pool.
        paging: where slots lie among them.
    """

    def __init__(self, rows: torch.Tensor, paging: Paging) -> None:
        self._rows = rows
        self._paging = paging

    def __len__(self) -> int:
        return self._paging.slots

    def __getitem__(self, slots: slice | torch.Tensor, /) -> torch.Tensor:
        """Return a copy of the rows of slots, int64 ``[n]`` or a range of numbers."""
        if isinstance(slots, slice):
            slots = torch.arange(*slots.indices(len(self)), device=self.device)
        return self._rows.index_select(0, self._paging.rows(slots))

    @property
    def device(self) -> torch.device:
        return self._rows.device


def by_slot(rows: torch.Tensor, paging: Paging | None) -> SlotRows:
    """Return a tensor's rows by slot: itself if it has one row per slot."""
    return rows if paging is None else PagedRows(rows, paging)
