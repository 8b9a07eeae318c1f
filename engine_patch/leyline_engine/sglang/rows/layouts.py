"""The layouts of SGLang's KV pools in which rows can be spliced; others are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from leyline_engine.rows.blocks import pool_of_views
from leyline_engine.rows.mover import PoolTensors


class UnsupportedPoolError(Exception):
    """The pool is of no form in which rows can be spliced."""


def read_pool(pool: object, key_scales: Iterable[object] = ()) -> PoolTensors:
    """Return the tensors of one of SGLang's KV pools.

    Args:
        pool: ``MLATokenToKVPool`` or ``MHATokenToKVPool``, and no subclass: those keep more, or
            keep it elsewhere.
        key_scales: ``k_scale`` of each attention layer: None, or a tensor.

    Returns:
        tensors whose rotary band isn't known yet.

    Raises:
        UnsupportedPoolError: another class, or another layout of these.
    """
    layout = _LAYOUTS.get(_name(pool))
    if layout is None:
        raise UnsupportedPoolError(f"KV pool class {type(pool).__qualname__}")
    tensors = layout(pool)
    if tensors.packed and any(
        s is not None and torch.as_tensor(s).numel() != 1 for s in key_scales
    ):
        raise UnsupportedPoolError("more than one KV scale per layer")
    return tensors


def whole_pool(pool: Any) -> Any:
    """Return the pool of the layers that keep all rows: of a hybrid pool, a part."""
    return pool.full_kv_pool if _name(pool) in {_HYBRID, _WINDOWED} else pool


def window_pool(pool: Any) -> Any | None:
    """Return the pool of the layers that keep a sliding window's rows; None if there are none."""
    return pool.swa_kv_pool if _name(pool) == _WINDOWED else None


def layers_of(pool: Any) -> tuple[list[int], list[int]]:
    """Return the layers that keep all rows, and those that keep a window's, as the model numbers
    them, in the order of their pools."""
    if _name(pool) == _WINDOWED:
        places = sorted((at, layer, swa) for layer, (at, swa) in pool.layers_mapping.items())
        return [n for _, n, swa in places if not swa], [n for _, n, swa in places if swa]
    if _name(pool) == _HYBRID:
        return sorted(pool.full_attention_layer_id_mapping), []
    first = int(pool.start_layer)
    return list(range(first, first + int(pool.layer_num))), []


def read_states(pool: Any) -> list[torch.Tensor]:
    """Return all that a slot of SGLang's pool of recurrent states holds, ``[layers, slots, ...]``.

    Raises:
        UnsupportedPoolError: it holds more.
    """
    kept = pool.mamba_cache
    more = [f for f in vars(kept) if f not in {"conv", "temporal"} and vars(kept)[f] is not None]
    if type(pool).__name__ != "MambaPool" or more or len(pool._slot_siblings):
        what = ", ".join(more) or type(pool).__name__
        raise UnsupportedPoolError(f"recurrent states that keep more: {what}")
    return [tensor for tensor in (*kept.conv, kept.temporal) if tensor.numel()]


def _packed(pool: Any, buffers: Sequence[torch.Tensor]) -> torch.dtype | None:
    """Return the dtype of numbers that a pool's buffers hold as bytes; None if it is their own."""
    if not buffers or buffers[0].dtype == pool.dtype:
        return None
    if (buffers[0].dtype, pool.dtype) != (torch.uint8, torch.float8_e4m3fn):
        raise UnsupportedPoolError(f"KV dtype {str(pool.dtype).removeprefix('torch.')}")
    return torch.float8_e4m3fn


def _mla(pool: Any) -> PoolTensors:
    if pool.kv_cache_dim != pool.kv_lora_rank + pool.qk_rope_head_dim:
        raise UnsupportedPoolError("an MLA pool whose rows hold more than latent and rotary key")
    if pool.dsa_kv_cache_store_fp8 or pool.kv_scale_buffer is not None:
        raise UnsupportedPoolError("an MLA pool with scales of its own")
    return _opened(pool, [_by_token(layer) for layer in pool.kv_buffer], [])


def _mha(pool: Any) -> PoolTensors:
    if pool.is_quantized_kv_cache or pool.k_scale_buffer is not None:
        raise UnsupportedPoolError("quantised KV")
    by_block = _BLOCKS.get(pool.kv_cache_layout)
    if by_block is None:
        raise UnsupportedPoolError(f"KV pool layout {pool.kv_cache_layout!r}")
    return _opened(pool, *([by_block(t) for t in each] for each in (pool.k_buffer, pool.v_buffer)))


def _by_token(layer: torch.Tensor) -> torch.Tensor:
    """Return ``[slots, heads, dim]`` as blocks of one slot."""
    if layer.dim() != 3 or not layer[0].is_contiguous():
        raise UnsupportedPoolError("a KV pool whose rows aren't one token each, contiguous")
    return layer[:, None]


def _by_page(layer: torch.Tensor) -> torch.Tensor:
    """Return ``[pages, heads, slots per page, dim]`` as blocks of a page's slots."""
    if layer.dim() != 4 or not layer[0].is_contiguous():
        raise UnsupportedPoolError("a KV pool whose pages aren't heads of tokens, contiguous")
    return layer.transpose(1, 2)


_BLOCKS = {"nhd": _by_token, "hnd": _by_page}
"""Views ``[blocks, slots per block, heads, dim]`` of a layer, by SGLang's names of layouts."""


def _opened(pool: Any, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> PoolTensors:
    if not keys:
        raise UnsupportedPoolError("a KV pool without layers")
    try:
        return pool_of_views(keys, values, packed=_packed(pool, keys), capacity=pool.size)
    except ValueError as error:
        raise UnsupportedPoolError(str(error)) from error


def _name(pool: object) -> str:
    return f"{type(pool).__module__}.{type(pool).__qualname__}"


_HYBRID = "sglang.srt.mem_cache.memory_pool.HybridLinearKVPool"
_WINDOWED = "sglang.srt.mem_cache.swa_memory_pool.SWAKVPool"
_LAYOUTS: Mapping[str, Callable[[Any], PoolTensors]] = {
    "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool": _mla,
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool": _mha,
}
