"""A transformers cache over preallocated tensors, with a write position that we set.

One running request owns one. Reused and spliced positions are filled from the pool; the model's
attention then appends at ``length`` and reads ``[0, length)``.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from leyline_replay.cache.pool import KVLayout


class WorkingLayer(CacheLayerMixin):
    """One layer: two tensors ``[1, heads, capacity, dim]`` and a common length."""

    is_sliding = False

    def __init__(self, layout: KVLayout, capacity: int, device: torch.device) -> None:
        super().__init__()
        self.dtype, self.device = layout.dtype, device
        self.capacity = capacity
        self.length = 0
        self._layout = layout

        def empty(heads: int, dim: int) -> torch.Tensor:
            return torch.empty(1, heads, capacity, dim, dtype=layout.dtype, device=device)

        self.keys, self.values = (empty(heads, dim) for heads, dim in layout.shapes)
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the tensors exist from the start."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        end = self.length + key_states.shape[-2]
        # Attention reads what the pool is going to have.
        layout = self._layout
        self.keys[:, :, self.length : end] = layout.decode(layout.encode(key_states))
        self.values[:, :, self.length : end] = layout.decode(layout.encode(value_states))
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.capacity


class WorkingCache(Cache):
    """The contiguous KV of one running request."""

    def __init__(self, layout: KVLayout, capacity: int, device: torch.device) -> None:
        self.working = [WorkingLayer(layout, capacity, device) for _ in range(layout.layers)]
        super().__init__(layers=self.working)

    def set_length(self, length: int) -> None:
        """Make the next forward write at ``length`` and see only the positions before it."""
        for layer in self.working:
            layer.length = length

    def fill(self, layer: int, start: int, pair: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Place pool rows (``[T, heads, dim]`` each) at positions ``start…`` of a layer."""
        end = start + pair[0].shape[0]
        target = self.working[layer]
        target.keys[0, :, start:end] = pair[0].transpose(0, 1)
        target.values[0, :, start:end] = pair[1].transpose(0, 1)

    def rows(self, layer: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return positions ``[start, end)`` of a layer as ``[T, heads, dim]`` each."""
        source = self.working[layer]
        return (
            source.keys[0, :, start:end].transpose(0, 1),
            source.values[0, :, start:end].transpose(0, 1),
        )
