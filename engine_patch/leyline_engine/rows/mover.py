"""The mover of a KV pool's rows: the one step of a splice that touches the pool's tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from leyline_engine.rotary.rotation import ModelRotary
from leyline_engine.rows.packing import pack, unpack
from leyline_engine.rows.paging import Paging

_CHUNK = 2048
"""Rows per step in plain torch: bounds the memory beside the pool, and stays in cache."""

_SHORTEST_RUN = 64
"""Rows: shorter runs, on average, are scattered one by one."""

_Turns = list[tuple[torch.Tensor, torch.Tensor]]
"""Cosines and sines of each distinct rotation, spread."""


@dataclass(frozen=True, slots=True)
class PoolTensors:
    """A KV pool's tensors, one per layer, ``[slots, heads, dim]`` each, with any strides.

    Where blocks of slots lie apart, they are ``[rows, heads, dim]``, and a slot's row is another
    than its number; see :mod:`.blocks`, which reads such pools.
    """

    pool_class: str
    """``mla_latent`` or ``gqa``, as in the capability document."""
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    """Values per layer; empty if a key's row holds everything (MLA)."""
    capacity: int
    """Number of slots that can hold tokens; the tensors have a few more."""
    rotary_start: int = 0
    rotary_dim: int = 0
    """The key's dimensions ``[rotary_start, rotary_start + rotary_dim)`` turn with position."""
    packed: torch.dtype | None = None
    """Dtype of numbers that the tensors hold as bytes (FP8); None: the tensors' own."""
    key_paging: Paging | None = None
    """Rows of slots among the keys; None if they are the slots' numbers."""
    value_paging: Paging | None = None
    """The same among the values."""

    @property
    def slots(self) -> int:
        return int(self.keys[0].shape[0]) if self.key_paging is None else self.key_paging.slots

    def key_rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the rows among the keys of slots, int64 each."""
        return slots if self.key_paging is None else self.key_paging.rows(slots)

    def value_rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the rows among the values of slots, int64 each."""
        return slots if self.value_paging is None else self.value_paging.rows(slots)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the numbers."""
        return self.packed or self.stored

    @property
    def stored(self) -> torch.dtype:
        """Dtype of the tensors."""
        return self.keys[0].dtype

    @property
    def device(self) -> torch.device:
        return self.keys[0].device

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one slot over all layers."""
        return sum(t[0].numel() * t.element_size() for t in (*self.keys, *self.values))

    def turning(self, start: int, dim: int) -> PoolTensors:
        """Return the same tensors with a rotary band.

        Raises:
            ValueError: a key has no such dimensions.
        """
        if not 0 <= start <= start + dim <= int(self.keys[0].shape[-1]):
            raise ValueError(f"keys of {self.keys[0].shape[-1]} dimensions, turned {start}…{dim}")
        return replace(self, rotary_start=start, rotary_dim=dim)

    def band(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the rotary part of ``[..., dim]`` keys, as a view."""
        return keys[..., self.rotary_start : self.rotary_start + self.rotary_dim]

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        """Return stored elements as numbers: fp32 if they are packed, else as they are."""
        return stored if self.packed is None else unpack(stored, self.packed)

    def encode(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return numbers as they are stored; see :func:`leyline_engine.rows.packing.pack`."""
        return numbers if self.packed is None else pack(numbers, self.packed)


@dataclass(frozen=True, slots=True)
class Move:
    """Rows to copy, and the keys from which each is turned. Vectors of length n, on the device.

    Targets are distinct and none is a source; no origin is claimed in the same move.
    """

    source: torch.Tensor
    """int64 slots."""
    target: torch.Tensor
    """int64 slots."""
    origin: torch.Tensor
    """int64 rows of the origin store whose as-computed key is turned; -1: the source's own key."""
    claimed: torch.Tensor
    """int64 rows that take the source's own key as the as-computed one; -1: none."""
    computed_at: torch.Tensor
    """int64 positions at which the keys to turn were computed."""
    needed_at: torch.Tensor
    """int64 positions of the targets."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a tensor."""

    rows: torch.Tensor
    """int64 ``[n]``, distinct."""
    runs: tuple[slice, ...]
    """The same as runs of evenly spaced rows; empty if they aren't known."""

    @classmethod
    def of(cls, slots: torch.Tensor, paging: Paging | None = None) -> Rows:
        """Return the rows of slots with their runs, if a few hold them all and the host sees them.

        Copying a run takes a CPU a quarter of the time of scattering its rows.
        """
        rows, step = (slots, 1) if paging is None else (paging.rows(slots), paging.step)
        if rows.device.type != "cpu" or not len(rows):
            return cls(rows, ())
        ends = torch.nonzero(rows[1:] - rows[:-1] != step).flatten() + 1
        if len(ends) >= max(1, len(rows) // _SHORTEST_RUN):
            return cls(rows, ())
        begins = [0, *ends.tolist()]
        lasts = [*(ends - 1).tolist(), len(rows) - 1]
        edges = zip(rows[begins].tolist(), rows[lasts].tolist(), strict=True)
        return cls(rows, tuple(slice(first, last + 1, step) for first, last in edges))

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return these rows of ``tensor [rows, ...]``: a view if they are one run."""
        if len(self.runs) == 1:
            return tensor[self.runs[0]]
        return tensor.index_select(0, self.rows)

    def copy(self, source: Rows, tensor: torch.Tensor) -> None:
        """Copy to these rows of ``tensor [rows, ...]`` others of its rows, none of them here."""
        whole = bool(self.runs)  # index_copy_ takes no view of the tensor that it writes to
        self.write(tensor, source.read(tensor) if whole else tensor.index_select(0, source.rows))

    def write(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Write ``values [n, ...]`` to these rows of ``tensor [rows, ...]``."""
        if not self.runs:
            tensor.index_copy_(0, self.rows, values)
        at = 0
        for run in self.runs:
            place = tensor[run]
            place.copy_(values[at : at + len(place)])
            at += len(place)


class RowMover(Protocol):
    """Copies and turns rows of one pool, in all layers."""

    def move(self, move: Move, as_computed: torch.Tensor) -> None:
        """Copy rows and turn their keys; ``as_computed [layers, rows, heads, rotary_dim]``."""

    def certify(
        self,
        slots: torch.Tensor,
        origin: torch.Tensor,
        computed_at: torch.Tensor,
        stands_at: torch.Tensor,
        as_computed: torch.Tensor,
    ) -> torch.Tensor:
        """Return True where turning ``origin``'s key gives exactly the slot's key, in every layer.

        Args:
            slots: int64 ``[n]``.
            origin: int64 ``[n]`` rows of ``as_computed``; -1: none, which certifies nothing.
            computed_at: int64 ``[n]`` positions at which the origins were computed.
            stands_at: int64 ``[n]`` positions of the slots.

        Returns:
            bool ``[n]``.
        """


class TorchMover:
    """The mover in plain torch, for every device."""

    def __init__(self, tensors: PoolTensors, rotary: ModelRotary) -> None:
        self._tensors = tensors
        self._rotary = rotary

    def move(self, move: Move, as_computed: torch.Tensor) -> None:
        """Move rows; see :meth:`RowMover.move`."""
        for start in range(0, len(move.source), _CHUNK):
            part = slice(start, start + _CHUNK)
            self._move_chunk(
                Move(
                    move.source[part],
                    move.target[part],
                    move.origin[part],
                    move.claimed[part],
                    move.computed_at[part],
                    move.needed_at[part],
                ),
                as_computed,
            )

    def _move_chunk(self, move: Move, as_computed: torch.Tensor) -> None:
        returning = torch.nonzero(move.origin >= 0).flatten()
        origin = move.origin[returning]
        claiming = torch.nonzero(move.claimed >= 0).flatten()
        claimed, every = move.claimed[claiming], len(claiming) == len(move.claimed)
        turns = self._turns(move.computed_at, move.needed_at)
        tensors, kept = self._tensors, Rows.of(claimed)
        source, target = (
            Rows.of(slots, tensors.key_paging) for slots in (move.source, move.target)
        )
        self._copy_values(move, source, target)
        for layer, keys in enumerate(tensors.keys):
            band = tensors.band(keys)
            turning = source.read(band).clone() if len(returning) else source.read(band)
            if len(claiming):
                kept.write(
                    as_computed[layer], turning if every else turning.index_select(0, claiming)
                )
            if len(returning):
                turning.index_copy_(0, returning, as_computed[layer].index_select(0, origin))
            turned = self._turned(layer, turning, turns)
            if band.shape[-1] < keys.shape[-1]:
                target.copy(source, keys)
            target.write(band, turned)

    def _copy_values(self, move: Move, source: Rows, target: Rows) -> None:
        """Copy values; ``source`` and ``target`` are the rows among the keys."""
        tensors = self._tensors
        if tensors.value_paging != tensors.key_paging:
            source, target = (
                Rows.of(slots, tensors.value_paging) for slots in (move.source, move.target)
            )
        for values in tensors.values:
            target.copy(source, values)

    def certify(
        self,
        slots: torch.Tensor,
        origin: torch.Tensor,
        computed_at: torch.Tensor,
        stands_at: torch.Tensor,
        as_computed: torch.Tensor,
    ) -> torch.Tensor:
        """Certify rows; see :meth:`RowMover.certify`."""
        certified = torch.zeros(len(slots), dtype=torch.bool, device=slots.device)
        believed = torch.nonzero(origin >= 0).flatten()
        for start in range(0, len(believed), _CHUNK):
            chosen = believed[start : start + _CHUNK]
            turns = self._turns(computed_at[chosen], stands_at[chosen])
            for layer, keys in enumerate(self._tensors.keys):
                kept = as_computed[layer].index_select(0, origin[chosen])
                turned = self._turned(layer, kept, turns)
                held = self._tensors.key_rows(slots[chosen])
                band = self._tensors.band(keys).index_select(0, held)
                if torch.equal(turned, band):
                    continue
                # Most rows that others have written since differ in the first layer already.
                same = (turned == band).flatten(1).all(dim=1)
                chosen = chosen[same]
                turns = [(cos[same], sin[same]) for cos, sin in turns]
                if not len(chosen):
                    break
            certified[chosen] = True
        return certified

    def _turned(self, layer: int, band: torch.Tensor, turns: _Turns) -> torch.Tensor:
        """Return stored keys ``[T, heads, d]``, turned; those that stay keep their bits."""
        tensors = self._tensors
        cos, sin = turns[self._rotary.index(layer)]
        turned = tensors.encode(self._rotary.at(layer).apply(tensors.decode(band), cos, sin))
        if tensors.packed is None:
            return turned
        # Zeros are frequent in eight bits, and a turn by nothing may change their sign.
        return torch.where((cos == 1) & (sin == 0), band, turned)

    def _turns(self, computed_at: torch.Tensor, needed_at: torch.Tensor) -> _Turns:
        return [
            rotary.spread(*rotary.turns(computed_at, needed_at)) for rotary in self._rotary.distinct
        ]
