"""A transformers cache over preallocated tensors, with a write position that we set.

One running request owns one. Reused and spliced positions are filled from the pool; the model's
attention then appends at ``length`` and reads ``[0, length)``, or the part of it that its window
has. Recurrent layers continue from the state that the last forward left, or that we set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer

from leyline_replay.cache.pool import KVLayout
from leyline_replay.cache.states import State, StateKind, StateTensor


class WorkingLayer(CacheLayerMixin):
    """One layer: two tensors ``[1, heads, capacity, dim]`` and a common length."""

    def __init__(self, layout: KVLayout, number: int, capacity: int, device: torch.device) -> None:
        super().__init__()
        self.dtype, self.device = layout.dtype, device
        self.capacity = capacity
        self.length = 0
        self._layout = layout
        self._window = layout.windows[number] if layout.windows else 0
        self.is_sliding = bool(self._window)

        def empty(heads: int, dim: int) -> torch.Tensor:
            return torch.empty(1, heads, capacity, dim, dtype=layout.dtype, device=device)

        self.keys, self.values = (empty(heads, dim) for heads, dim in layout.shapes[number])
        self.is_initialized = True

    @property
    def _first(self) -> int:
        """First position that the next forward reads."""
        return max(0, self.length - self._window) if self._window else 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the tensors exist from the start."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first, end = self._first, self.length + key_states.shape[-2]
        # Attention reads what the pool is going to have.
        layout = self._layout
        self.keys[:, :, self.length : end] = layout.decode(layout.encode(key_states))
        self.values[:, :, self.length : end] = layout.decode(layout.encode(value_states))
        self.length = end
        return self.keys[:, :, first:end], self.values[:, :, first:end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length - self._first + query_length, self._first

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.capacity


class WorkingCache(Cache):
    """The contiguous KV, and the state, of one running request.

    Args:
        forms: of the state's tensors; layers that have neither rows nor state cache nothing.
        layers: number of the model's layers.
    """

    def __init__(
        self,
        layout: KVLayout,
        capacity: int,
        device: torch.device,
        *,
        forms: Sequence[StateTensor] = (),
        layers: int | None = None,
    ) -> None:
        self.working = [
            WorkingLayer(layout, number, capacity, device) for number in range(layout.layers)
        ]
        self._forms = forms
        self.position = 0
        """Number of the tokens that the state has read."""
        of_place: dict[int, Any] = dict(
            zip(layout.places or range(layout.layers), self.working, strict=True)
        )
        for form in forms:
            of_place.setdefault(form.place, LinearAttentionLayer(_count(forms, form.place)))
            _hold(of_place[form.place], form, device)
        count = len(of_place) if layers is None else layers
        # Transformers' own caches have such layers where nothing is cached.
        super().__init__(
            layers=[of_place.get(place) or LinearAttentionLayer() for place in range(count)]
        )

    def set_length(self, length: int) -> None:
        """Make the next forward write at ``length`` and see only the positions before it."""
        for layer in self.working:
            layer.length = length

    def set_state(self, position: int, state: State | None) -> None:
        """Make the next forward continue from a state; None for that of a sequence's start."""
        self.position = position
        for number, form in enumerate(self._forms):
            layer = self._layer(form)
            tensor = getattr(layer, form.kind)[form.number][0]
            tensor.zero_() if state is None else tensor.copy_(state[number])
            layer.has_previous_state[form.number] = state is not None

    def state(self) -> State:
        """Return the state after the last forward; the tensors are the cache's own."""
        return [getattr(self._layer(form), form.kind)[form.number][0] for form in self._forms]

    def _layer(self, form: StateTensor) -> Any:
        return self.layers[form.place]

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


def _count(forms: Sequence[StateTensor], place: int) -> int:
    """Return the number of a layer's states of one kind."""
    return 1 + max(form.number for form in forms if form.place == place)


def _hold(layer: Any, form: StateTensor, device: torch.device) -> None:
    """Give a layer the tensor of a state, which forwards overwrite in place."""
    tensor = torch.zeros(1, *form.shape, dtype=form.dtype, device=device)
    getattr(layer, form.kind)[form.number] = tensor
    if form.kind is StateKind.CONVOLUTION:
        layer.is_conv_states_initialized[form.number] = True
        layer.conv_kernel_size[form.number] = form.shape[-1]
        layer.dtype, layer.device = form.dtype, device
    else:
        layer.is_recurrent_states_initialized[form.number] = True
