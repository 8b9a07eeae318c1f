"""Pools in which an engine keeps blocks of slots, read from where their elements lie in memory.

Engines order the dimensions of a block as their attention kernels like it: keys and values in one
tensor, heads in front of tokens, or a head's dimensions in front of tokens. Where each element lies
is all that a splice needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import torch

from leyline_engine.rows.mover import PoolTensors
from leyline_engine.rows.paging import Paging


@dataclass(frozen=True, slots=True)
class Strides:
    """Places of one layer's keys, or values, in its tensor.

    Element ``d`` of head ``h`` of slot ``s``, with ``B`` slots per block, lies at
    ``offset + s // B * block + s % B * token + h * head + d * dim``. All five are in elements of
    the tensor's dtype, not in bytes.
    """

    offset: int
    """From the tensor's first element; other elements' places count from there in memory, whatever
    the tensor's own strides are."""
    block: int
    token: int
    head: int
    dim: int


@dataclass(frozen=True, slots=True)
class RowLayout:
    """One slot's keys, or values, in each layer."""

    heads: int
    dim: int
    """Elements per head; of an MLA key, latent and rotary part together."""
    strides: Strides


def pool_of_tensors(
    tensors: Sequence[torch.Tensor],
    *,
    blocks: int,
    block_size: int,
    keys: RowLayout,
    values: RowLayout | None,
    packed: torch.dtype | None = None,
    capacity: int | None = None,
) -> PoolTensors:
    """Return a pool in which each layer has one tensor, of any shape, for its keys and values.

    Args:
        tensors: one per layer. fp32, bf16 or fp16, or 8 bits: uint8 with ``packed``, or e4m3.
        blocks: blocks per layer.
        block_size: slots per block.
        keys: in all layers alike.
        values: None if a key's row holds everything (MLA).
        packed: ``torch.float8_e4m3fn`` if uint8 tensors hold such numbers.
        capacity: slots that can hold tokens; all of them by default.

    Returns:
        a pool of ``blocks * block_size`` slots whose rotary band isn't known yet. It shares the
        memory of ``tensors``.

    Raises:
        ValueError: elements lie outside their tensor, or share memory; or another dtype.
    """
    count = (blocks, block_size)
    return pool_of_views(
        [_view(tensor, count, keys) for tensor in tensors],
        [] if values is None else [_view(tensor, count, values) for tensor in tensors],
        packed=packed,
        capacity=capacity,
    )


def pool_of_views(
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    *,
    packed: torch.dtype | None = None,
    capacity: int | None = None,
) -> PoolTensors:
    """Return a pool of views ``[blocks, slots per block, heads, dim]`` with any strides.

    Args:
        keys: one per layer.
        values: one per layer; none for MLA.
        packed: see :func:`pool_of_tensors`.
        capacity: see :func:`pool_of_tensors`.

    Raises:
        ValueError: layers differ, elements share memory, or it is another dtype.
    """
    if not keys or len(values) not in {0, len(keys)}:
        raise ValueError(f"keys of {len(keys)} layers, values of {len(values)}")
    if values and keys[0].shape[:2] != values[0].shape[:2]:
        raise ValueError("keys and values in different blocks")
    if keys[0].dtype == torch.float8_e4m3fn:
        packed = torch.float8_e4m3fn
    if packed not in {None, torch.float8_e4m3fn}:
        raise ValueError(f"KV dtype {str(packed).removeprefix('torch.')}")
    stored = keys[0].dtype if packed is None else torch.uint8
    if any(view.dtype not in {stored, packed} for view in (*keys, *values)):
        raise ValueError("KV of several dtypes")
    key_rows, key_paging = _rows(keys, stored)
    value_rows, value_paging = _rows(values, stored) if values else ((), None)
    slots = int(keys[0].shape[0] * keys[0].shape[1])
    return PoolTensors(
        pool_class="gqa" if values else "mla_latent",
        keys=key_rows,
        values=value_rows,
        capacity=slots if capacity is None else capacity,
        packed=packed,
        key_paging=key_paging,
        value_paging=value_paging,
    )


def _view(tensor: torch.Tensor, count: tuple[int, int], layout: RowLayout) -> torch.Tensor:
    """Return ``[blocks, slots per block, heads, dim]`` of a tensor.

    Raises:
        ValueError: elements would lie outside the tensor.
    """
    shape = (*count, layout.heads, layout.dim)
    at = layout.strides
    strides = (at.block, at.token, at.head, at.dim)
    if min(at.offset, *strides) < 0 or at.offset + _reach(shape, strides) >= _end(tensor):
        raise ValueError(f"{shape} with {at} doesn't fit in a tensor of {_end(tensor)} elements")
    return tensor.as_strided(shape, strides, tensor.storage_offset() + at.offset)


def _reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the distance from the first element to the last."""
    return sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _end(tensor: torch.Tensor) -> int:
    return 1 + _reach(tensor.shape, tensor.stride()) if tensor.numel() else 0


def _rows(
    views: Sequence[torch.Tensor], stored: torch.dtype
) -> tuple[tuple[torch.Tensor, ...], Paging | None]:
    """Return views as rows ``[rows, heads, dim]``, and where slots lie among them."""
    first = views[0]
    if any((v.shape, v.stride()) != (first.shape, first.stride()) for v in views):
        raise ValueError("a KV pool whose layers differ in shape")
    blocks, size, heads, dim = first.shape
    block, token, head, step = first.stride()
    wide = sorted((stride, n) for n, stride in zip(first.shape, first.stride(), strict=True))
    reach = 0
    for stride, n in wide:
        if n > 1 and stride <= reach:
            raise ValueError("elements of a KV pool share memory")
        reach += (n - 1) * stride
    if size == 1:
        token = block
    unit = token if block == size * token or blocks == 1 else gcd(block, token)
    flat = block == size * token or blocks == 1
    last = (blocks - 1) * block + (size - 1) * token
    shape, strides = (last // unit + 1, heads, dim), (unit, head, step)
    rows = tuple(view.as_strided(shape, strides).view(stored) for view in views)
    paging = None if flat else Paging(blocks * size, size, block // unit, token // unit)
    return rows, paging
