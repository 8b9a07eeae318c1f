"""Copies of a KV pool's rows in the host's memory, as an engine that makes them shows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from leyline_engine.proof.digests import Part
from leyline_engine.proof.witness import Slots


class CopiedRows(Protocol):
    """Rows of a pool in the host's memory, each in a slot of its own there."""

    erased: Callable[[torch.Tensor], None]
    """Called with rows that have been overwritten, numbered as in proofs."""

    def __len__(self) -> int:
        """Return the number of slots."""

    def numbers(self, slots: Slots) -> Slots:
        """Return host slots as proofs number them: after all of the device's."""

    def freed(self, slots: torch.Tensor) -> None:
        """Record that the engine freed host slots, int64 ``[n]``; their rows stay there."""

    def emptied(self) -> None:
        """Record that the engine is about to free all slots."""

    def is_stale(self, slots: torch.Tensor) -> bool:
        """Return True if any of these slots, int64 ``[n]``, may hold what was freed there."""

    def erase(self, slots: torch.Tensor) -> None:
        """Overwrite the rows of host slots, int64 ``[n]``, in all layers."""

    def scrub(self) -> None:
        """Overwrite what free slots still hold, and what copies to the host left on their way."""

    def parts(self) -> list[Part]:
        """Return the tensors that proofs look at."""

    def filled_free(self) -> Slots:
        """Return the free rows that hold anything, by number."""
