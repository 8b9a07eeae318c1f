"""Attention layers that write KV as vLLM's back ends for GPUs do, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

BLOCKS, BLOCK, HEADS, DIM = 11, 16, 2, 8
Views = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Returns keys and values of a cache as ``[blocks, tokens, heads, dim]``."""


class Writer:
    """An attention's implementation, as far as it writes keys and values."""

    def __init__(self, views: Views) -> None:
        self._views = views

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, cache: Any, slots: torch.Tensor
    ) -> None:
        """Write rows to slots."""
        keys, values = self._views(cache)
        block, token = slots // keys.shape[1], slots % keys.shape[1]
        keys[block, token] = key
        values[block, token] = value


class LatentWriter:
    """The same of MLA: one row for a token."""

    def do_kv_cache_update(
        self,
        latent: torch.Tensor,
        turned: torch.Tensor,
        cache: torch.Tensor,
        slots: torch.Tensor,
        *settings: Any,
    ) -> None:
        """Write rows to slots."""
        rows = torch.cat((latent, turned.squeeze(1)), dim=1)
        cache[slots // cache.shape[1], slots % cache.shape[1]] = rows


def layer_of(cache: torch.Tensor, impl: Any, **settings: Any) -> Any:
    """An attention layer with a cache and an implementation."""
    plain = {
        "kv_cache": cache,
        "impl": impl,
        "kv_cache_dtype": "auto",
        "num_kv_heads": HEADS,
        "head_size": DIM,
        "head_size_v": DIM,
        "kv_sharing_target_layer_name": None,
    }
    return SimpleNamespace(**(plain | settings))


def latent_layer(cache: torch.Tensor) -> Any:
    """An MLA layer with rows of 24 and 8."""
    return SimpleNamespace(
        kv_cache=cache,
        impl=LatentWriter(),
        kv_cache_dtype="auto",
        kv_lora_rank=24,
        qk_rope_head_dim=8,
        _k_scale=torch.ones(()),
    )


def _of_cpu(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys by dimension first, in front of the values of the same head."""
    halves = cache.view(cache.shape[0], HEADS, 2, BLOCK * DIM)
    keys = halves[:, :, 0].view(-1, HEADS, DIM, BLOCK).permute(0, 3, 1, 2)
    return keys, halves[:, :, 1].view(-1, HEADS, BLOCK, DIM).transpose(1, 2)


def _between_layers(dtype: torch.dtype) -> torch.Tensor:
    """The second of three layers whose pages lie side by side in each block."""
    page = HEADS * BLOCK * 2 * DIM
    whole = torch.zeros(BLOCKS * 3 * page, dtype=dtype)
    strides = (3 * page, BLOCK * 2 * DIM, 2 * DIM, 1)
    return whole.as_strided((BLOCKS, HEADS, BLOCK, 2 * DIM), strides, page)


def _packed(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = cache.transpose(1, 2).split(DIM, dim=-1)
    return keys, values


def _shaped(*shape: int) -> Callable[[torch.dtype], torch.Tensor]:
    return lambda dtype: torch.zeros(shape, dtype=dtype)


LAYOUTS: dict[str, tuple[Callable[[torch.dtype], torch.Tensor], Views]] = {
    "keys, then values": (
        _shaped(2, BLOCKS, BLOCK, HEADS, DIM),
        lambda cache: (cache[0], cache[1]),
    ),
    "both in a block": (
        _shaped(BLOCKS, 2, BLOCK, HEADS, DIM),
        lambda cache: (cache[:, 0], cache[:, 1]),
    ),
    "by head": (
        _shaped(2, BLOCKS, HEADS, BLOCK, DIM),
        lambda cache: (cache[0].transpose(1, 2), cache[1].transpose(1, 2)),
    ),
    "both in a row": (_shaped(BLOCKS, HEADS, BLOCK, 2 * DIM), _packed),
    "between layers": (_between_layers, _packed),
    "keys by dimension": (_shaped(BLOCKS, HEADS, BLOCK, 2 * DIM), _of_cpu),
}
"""By name: an empty cache of a dtype, and its rows."""
