"""The layouts of SGLang's KV pools in which rows can be spliced; others are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

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
    kind = type(pool)
    layout = _LAYOUTS.get(f"{kind.__module__}.{kind.__qualname__}")
    if layout is None:
        raise UnsupportedPoolError(f"KV pool class {kind.__qualname__}")
    tensors = layout(pool)
    every = (*tensors.keys, *tensors.values)
    if not tensors.keys:
        raise UnsupportedPoolError("a KV pool without layers")
    if any(t.dim() != 3 or not t[0].is_contiguous() or t.dtype != tensors.stored for t in every):
        raise UnsupportedPoolError("a KV pool whose rows aren't one token each, contiguous")
    if len({(t.shape, t.stride()) for t in tensors.keys}) != 1:
        raise UnsupportedPoolError("a KV pool whose layers differ in shape")
    if len({(t.shape, t.stride()) for t in tensors.values}) > 1:
        raise UnsupportedPoolError("a KV pool whose layers differ in shape")
    if tensors.packed and any(
        s is not None and torch.as_tensor(s).numel() != 1 for s in key_scales
    ):
        raise UnsupportedPoolError("more than one KV scale per layer")
    return tensors


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
    return PoolTensors(
        pool_class="mla_latent",
        keys=tuple(pool.kv_buffer),
        values=(),
        capacity=pool.size,
        packed=_packed(pool, pool.kv_buffer),
    )


def _mha(pool: Any) -> PoolTensors:
    if pool.kv_cache_layout != "nhd":
        raise UnsupportedPoolError(f"KV pool layout {pool.kv_cache_layout!r}")
    if pool.is_quantized_kv_cache or pool.k_scale_buffer is not None:
        raise UnsupportedPoolError("quantised KV")
    return PoolTensors(
        pool_class="gqa",
        keys=tuple(pool.k_buffer),
        values=tuple(pool.v_buffer),
        capacity=pool.size,
        packed=_packed(pool, pool.k_buffer),
    )


_LAYOUTS: Mapping[str, Callable[[Any], PoolTensors]] = {
    "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool": _mla,
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool": _mha,
}
