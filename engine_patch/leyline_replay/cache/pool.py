"""The KV pool: the per-layer tensors that slots index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from leyline_engine.proof.digests import Part
from leyline_engine.rotary.rotation import ModelRotary
from leyline_engine.rows.packing import pack, unpack
from leyline_replay.cache.slots import Slots

RowShapes = tuple[tuple[int, int], tuple[int, int]]
"""(heads, dim) of a layer's first and of its second tensor."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The form of the layers' two cached tensors, as attention passes them to its cache.

    GQA caches (key, value); MLA caches (latent, k_pe). ``rotary_tensor`` names the one that carries
    position, in its dimensions ``[rotary_start, rotary_start + rotary_dim)``.
    """

    pool_class: str
    shapes: tuple[RowShapes, ...]
    """Shapes of each layer that caches rows."""
    rotary_tensor: int
    rotary_start: int
    rotary_dim: int
    dtype: torch.dtype
    packed: torch.dtype | None = None
    """Dtype of eight bits in which KV is kept; None: the model's, ``dtype``."""
    places: tuple[int, ...] = ()
    """The model's number of each layer that caches rows; empty if all do."""
    windows: tuple[int, ...] = ()
    """Per layer, the rows in front of a position that its sliding window has; 0 for all."""

    @property
    def layers(self) -> int:
        """Number of layers that cache rows."""
        return len(self.shapes)

    @property
    def window(self) -> int:
        """The most rows that a sliding window has; 0 if no layer has one."""
        return max(self.windows, default=0)

    @property
    def kept(self) -> torch.dtype:
        """Dtype of kept numbers."""
        return self.packed or self.dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one slot over all layers, the as-computed rotary key included."""
        elements = sum(heads * dim for pair in self.shapes for heads, dim in pair)
        elements += sum(pair[self.rotary_tensor][0] for pair in self.shapes) * self.rotary_dim
        return elements * self.kept.itemsize

    def encode(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return a model's numbers as the pool has them."""
        return numbers if self.packed is None else pack(numbers, self.packed)

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the pool's elements as the model's numbers."""
        return stored if self.packed is None else unpack(stored, self.packed).to(self.dtype)


class KVPool:
    """Two tensors ``[slots, heads, dim]`` per layer, and the rotary key as it was computed.

    The as-computed key and its position stay with every copy, so a chain of splices rotates
    once from the original and rounding doesn't pile up.
    """

    def __init__(
        self, layout: KVLayout, capacity: int, rotary: ModelRotary, device: torch.device
    ) -> None:
        self.layout = layout
        self.rotary = rotary.to(device)
        self.device = device

        def zeros(heads: int, dim: int) -> torch.Tensor:
            dtype = layout.dtype if layout.packed is None else torch.uint8
            return torch.zeros(capacity, heads, dim, dtype=dtype, device=device)

        self._tensors = [(zeros(*first), zeros(*second)) for first, second in layout.shapes]
        self._as_computed = [
            zeros(pair[layout.rotary_tensor][0], layout.rotary_dim) for pair in layout.shapes
        ]
        self._computed_at = torch.zeros(capacity, dtype=torch.int64, device=device)
        self._left = np.zeros(capacity, dtype=np.bool_)
        self.alive = np.zeros(capacity, dtype=np.bool_)
        """By slot, True if layers with a sliding window have its row, too."""

    def _index(self, slots: Slots) -> torch.Tensor:
        return torch.from_numpy(slots).to(self.device)

    def _rotary_view(self, tensor: torch.Tensor) -> torch.Tensor:
        start = self.layout.rotary_start
        return tensor[..., start : start + self.layout.rotary_dim]

    def read(self, layer: int, slots: Slots) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's two tensors for ``slots``: ``[T, heads, dim]`` each."""
        index = self._index(slots)
        first, second = self._tensors[layer]
        return self.layout.decode(first[index]), self.layout.decode(second[index])

    def write(
        self,
        slots: Slots,
        start: int,
        layers: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        """Store freshly computed KV of positions ``start…`` (``[T, heads, dim]`` per layer)."""
        self._left[slots], self.alive[slots] = False, True
        index = self._index(slots)
        for layer, pair in enumerate(layers):
            kept = [self.layout.encode(values) for values in pair]
            for tensor, values in zip(self._tensors[layer], kept, strict=True):
                tensor[index] = values
            self._as_computed[layer][index] = self._rotary_view(kept[self.layout.rotary_tensor])
        self._computed_at[index] = torch.arange(
            start, start + len(slots), dtype=torch.int64, device=self.device
        )

    def copy(self, source: Slots, target: Slots, start: int) -> None:
        """Copy slots to others and re-key them at positions ``start…``.

        One gather, rotation and scatter per layer; position-free parts are untouched.
        """
        self._left[target], self.alive[target] = False, self.alive[source]
        src, dst = self._index(source), self._index(target)
        computed_at = self._computed_at[src]
        needed_at = torch.arange(start, start + len(target), dtype=torch.int64, device=self.device)
        moved = (computed_at != needed_at)[:, None, None]
        for layer, pair in enumerate(self._tensors):
            for tensor in pair:
                tensor[dst] = tensor[src]
            original = self._as_computed[layer][src]
            self._as_computed[layer][dst] = original
            rotated = self._rotated(layer, original, computed_at, needed_at)
            rotary_tensor = pair[self.layout.rotary_tensor]
            self._rotary_view(rotary_tensor)[dst] = torch.where(moved, rotated, original)
        self._computed_at[dst] = computed_at

    def _rotated(
        self, layer: int, keys: torch.Tensor, computed_at: torch.Tensor, needed_at: torch.Tensor
    ) -> torch.Tensor:
        packed = self.layout.packed
        numbers = keys if packed is None else unpack(keys, packed)
        rotated = self.rotary.at(layer).rotate(numbers, computed_at, needed_at)
        return rotated if packed is None else pack(rotated, packed)

    def erase(self, slots: Slots) -> None:
        """Overwrite slots, so that forgotten content can't be read from the pool."""
        index = self._index(slots)
        for layer, pair in enumerate(self._tensors):
            for tensor in (*pair, self._as_computed[layer]):
                tensor[index] = 0
        self._computed_at[index] = 0
        self._left[slots] = False

    def leave(self, slots: Slots) -> None:
        """Note slots with unneeded content, which stays until it is overwritten."""
        self._left[slots] = True

    def drop(self, slots: Slots) -> None:
        """Note that layers with a sliding window have no use for rows any more: nobody reads them
        there, and whatever they hold goes when their slots are overwritten."""
        self.alive[slots] = False

    def left(self) -> Slots:
        """Return all slots that still hold unneeded content, whatever their owners now."""
        return np.flatnonzero(self._left)

    def tensors_of_layers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the two tensors of each layer."""
        return self._tensors

    def tensors_by_place(self) -> dict[str, list[torch.Tensor]]:
        """Return all tensors with one row per slot, by the place of a proof."""
        return {
            "pool": [each for pair in self._tensors for each in pair],
            "origin": [each for each in self._as_computed if each.shape[-1]],
        }

    def parts(self) -> list[Part]:
        """Return the tensors whose rows depend on the tokens in front of them.

        Those of a model's first layer depend on a row's own token alone.
        """
        start, end = self.layout.rotary_start, self.layout.rotary_start + self.layout.rotary_dim
        number = self.layout.rotary_tensor
        found: list[Part] = []
        first = self.layout.places[0] if self.layout.places else 0
        for layer in range(0 if first else 1, self.layout.layers):
            turned = self._tensors[layer][number]
            found.append(Part("pool", f"free {layer}", self._tensors[layer][1 - number]))
            if end > start:
                found += [
                    Part("pool", f"turned {layer}", turned[..., start:end]),
                    Part("origin", f"turned {layer}", self._as_computed[layer]),
                ]
            unturned = (turned[..., :start], turned[..., end:])
            found += [
                Part("pool", f"unturned {layer} {side}", rest)
                for side, rest in enumerate(unturned)
                if rest.shape[-1]
            ]
        return found
