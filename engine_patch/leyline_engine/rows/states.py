"""Recurrent states of an engine's pool: one per slot, with the inputs of the convolutions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from leyline_engine.proof.digests import Part

STATE = "state"
"""The place of a proof to which states belong."""


class StatePool:
    """States of all recurrent layers; copies and overwrites whole slots.

    Args:
        tensors: ``[layers, slots, ...]`` each, all that a slot holds.
        behind_forwards: orders all later work after the forwards in flight.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        *,
        behind_forwards: Callable[[], None] = lambda: None,
    ) -> None:
        self.tensors = tuple(tensors)
        self._behind_forwards = behind_forwards
        self.erased: Callable[[torch.Tensor], None] = lambda _: None
        """Called with slots that have been overwritten."""

    @property
    def slots(self) -> int:
        return int(self.tensors[0].shape[1])

    @property
    def layers(self) -> int:
        return int(self.tensors[0].shape[0])

    @property
    def bytes_per_state(self) -> int:
        """Bytes of one slot over all layers."""
        return sum(t[:, 0].numel() * t.element_size() for t in self.tensors)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy the states of slots, int64 ``[n]``, to others, bit for bit."""
        self._behind_forwards()
        for tensor in self.tensors:
            tensor.index_copy_(1, target, tensor.index_select(1, source))

    def erase(self, slots: torch.Tensor) -> None:
        """Overwrite the states of slots, int64 ``[n]``."""
        if not slots.numel():
            return
        self._behind_forwards()
        for tensor in self.tensors:
            tensor.index_fill_(1, slots, 0)
        self.erased(slots)

    def parts(self, first: int) -> list[Part]:
        """Return what a proof compares: the recurrent part of the last layer, by slot.

        Args:
            first: number of the first slot among those of the proof.
        """
        last = self.tensors[-1][-1]
        return [Part(STATE, "recurrent", last.flatten(1)[:, None], first=first)]
