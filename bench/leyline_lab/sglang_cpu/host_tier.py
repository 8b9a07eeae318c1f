"""SGLang's hierarchical cache on a CPU: a second pool in the same memory, and copies by PyTorch.

SGLang's own copies are kernels for accelerators, from and to memory that is pinned for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_RESERVE_BYTES = 1 << 28
"""Memory that the host's pool leaves to others; SGLang leaves what a server of GPUs needs."""


def register_host_tier() -> None:
    """Give this process's host pools memory and copies."""
    from sglang.srt.mem_cache.pool_host import base, common, mha, mla

    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = _RESERVE_BYTES
    common.ALLOC_MEMORY_FUNCS["cpu"] = _unpinned
    for module in (mha, mla):
        module.transfer_kv_direct = copy_rows


def _unpinned(
    dims: tuple[int, ...], *, dtype: torch.dtype, device: str, allocator: Any, **_: object
) -> torch.Tensor:
    """Return memory for a host's pool, zeroed; nothing is pinned."""
    rows: torch.Tensor = allocator.allocate(dims, dtype=dtype, device=device)
    return rows


def copy_rows(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy rows of each layer to other rows, as SGLang's ``transfer_kv_direct`` does.

    Args:
        src_layers: ``[slots, ...]`` each.
        dst_layers: as many, of the same rows.
        src_indices: int64 ``[n]``, whole pages.
        dst_indices: int64 ``[n]``.
        page_size: tokens per page.
    """
    if len(src_indices) != len(dst_indices) or len(src_indices) % page_size:
        raise ValueError(f"{len(src_indices)} rows of {page_size} to {len(dst_indices)}")
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]
