"""The state pool: copies of what recurrent layers and convolutions keep of a whole sequence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import prod

import numpy as np
import torch

from leyline_engine.proof.digests import Part
from leyline_replay.cache.slots import SlotAllocator, Slots


class StateKind(StrEnum):
    """The kinds of state, by the names of transformers' attributes."""

    CONVOLUTION = "conv_states"
    """The last inputs of a convolution."""
    RECURRENT = "recurrent_states"


@dataclass(frozen=True, slots=True)
class StateTensor:
    """The form of one tensor of a state."""

    place: int
    """The model's number of its layer."""
    kind: StateKind
    number: int
    """Its number among the layer's states of this kind."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one state's part."""
        return prod(self.shape) * self.dtype.itemsize


State = list[torch.Tensor]
"""The tensors of one state, in the order of a pool's forms."""


class StatePool:
    """States by slot: one tensor ``[slots, *shape]`` per form.

    Args:
        forms: of a state's tensors.
        reader: first layer of the model that reads tokens in front of its convolution's inputs;
            inputs of convolutions up to there depend on the last few tokens alone.
    """

    def __init__(
        self, forms: Sequence[StateTensor], capacity: int, device: torch.device, *, reader: int = 0
    ) -> None:
        self.forms, self.capacity, self._reader = tuple(forms), capacity, reader
        self._tensors = [
            torch.zeros(capacity, *form.shape, dtype=form.dtype, device=device) for form in forms
        ]
        self._slots = SlotAllocator(capacity)
        self._left = np.zeros(capacity, dtype=np.bool_)
        self._unerased: list[int] = []

    @property
    def bytes_per_state(self) -> int:
        """Bytes of one slot."""
        return sum(form.nbytes for form in self.forms)

    @property
    def free_count(self) -> int:
        """Number of free slots."""
        return self._slots.free_count

    def take(self) -> int | None:
        """Return a free slot; None if there is none."""
        slots = self._slots.allocate(1)
        return None if slots is None else int(slots[0])

    def read(self, slot: int) -> State:
        """Return the tensors of a slot; they are the pool's own."""
        return [tensor[slot] for tensor in self._tensors]

    def write(self, slot: int, state: Iterable[torch.Tensor]) -> None:
        """Store a state."""
        self._left[slot] = False
        for tensor, part in zip(self._tensors, state, strict=True):
            tensor[slot] = part

    def release(self, slots: Sequence[int]) -> None:
        """Take back slots; what they hold stays in them until it is overwritten."""
        released = np.array(slots, dtype=np.int64)
        self._slots.release(released)
        self._left[released] = True

    def erase(self, slots: Sequence[int]) -> Exception | None:
        """Overwrite slots, then take them back; those that can't be overwritten stay out of use,
        and are tried again the next time.

        Returns:
            The error, if there was one.
        """
        self._unerased += slots
        try:
            self._overwrite(np.array(self._unerased, dtype=np.int64))
        except Exception as error:
            return error
        self._slots.release(np.array(self._unerased, dtype=np.int64))
        self._unerased = []
        return None

    def scrub(self) -> None:
        """Overwrite all slots that hold what nobody needs, whatever their owners now."""
        self._overwrite(np.flatnonzero(self._left))

    def _overwrite(self, slots: Slots) -> None:
        for tensor in self._tensors:
            tensor[torch.from_numpy(slots)] = 0
        self._left[slots] = False

    def free_slots(self) -> Slots:
        """Return the slots that nobody has, those out of use included."""
        return np.concatenate([self._slots.free_slots(), np.array(self._unerased, dtype=np.int64)])

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors, with one row per slot."""
        return self._tensors

    def parts(self, first: int) -> list[Part]:
        """Return the tensors whose content depends on all tokens in front of a place.

        Args:
            first: the number under which proofs know slot 0.
        """
        return [
            Part("state", f"{form.kind} {form.place} {form.number}", tensor, first=first)
            for form, tensor in zip(self.forms, self._tensors, strict=True)
            if form.kind is StateKind.RECURRENT or form.place > self._reader
        ]
