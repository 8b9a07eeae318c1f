"""Causal attention of new tokens over a paged KV cache, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK_ROWS = 256
"""New rows per block: bounds the scores in memory at heads x 256 x sequence length."""


def attend_batch(
    query: Tensor,
    output: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    slots: list[Tensor],
    new_tokens: list[int],
    scale: float,
    seen: Tensor | None = None,
) -> None:
    """Write the attention of every sequence's last tokens to ``output``.

    Args:
        query: ``[tokens, heads, dim]``, the new tokens of all sequences one after the other.
        output: ``[tokens, heads, value_dim]``, written in place.
        k_cache: ``[pool, kv_heads, dim]``; query head ``h`` reads head ``h * kv_heads // heads``.
        v_cache: ``[pool, kv_heads, value_dim]``.
        slots: per sequence, the pool rows of all its tokens by position; the new ones included.
        new_tokens: per sequence, the number of its last tokens in ``query``.
        scale: factor on the scores before the softmax.
        seen: bool ``[sequences, new, new]``: which of a sequence's new tokens each of them attends
            to; by default all but later ones. Equally many are new in each sequence then.
    """
    start = 0
    for number, (sequence, count) in enumerate(zip(slots, new_tokens, strict=True)):
        end = start + count
        keys = k_cache[sequence].to(query.dtype)
        values = v_cache[sequence].to(query.dtype)
        unseen = None if seen is None else ~seen[number]
        _attend(query[start:end], output[start:end], keys, values, scale, unseen)
        start = end


def _attend(  # noqa: PLR0917
    query: Tensor,
    output: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    unseen: Tensor | None,
) -> None:
    """Attend one sequence block by block; row ``i`` of ``query`` reads all but later keys, or all
    but the ``unseen`` new ones."""
    count, heads, dim = query.shape
    length, kv_heads = keys.shape[:2]
    group = heads // kv_heads
    # [kv_heads, dim, length] and [kv_heads, length, value_dim]
    keys, values = keys.permute(1, 2, 0), values.permute(1, 0, 2)
    size = _BLOCK_ROWS if unseen is None else count
    for start in range(0, count, size):
        end = min(start + size, count)
        rows = end - start
        seen = length - count + end
        block = query[start:end].view(rows, kv_heads, group, dim).permute(1, 2, 0, 3)
        block = block.reshape(kv_heads, group * rows, dim)
        scores = torch.bmm(block, keys[:, :, :seen]).float().mul_(scale)
        future = unseen
        if future is None:
            future = torch.ones(rows, rows, dtype=torch.bool, device=scores.device).triu_(1)
        last = scores.view(kv_heads, group, rows, seen)[..., seen - rows :]
        last.masked_fill_(future, float("-inf"))
        weights = scores.softmax(-1).to(values.dtype)
        result = torch.bmm(weights, values[:, :seen]).view(kv_heads, group, rows, -1)
        output[start:end] = result.permute(2, 0, 1, 3).reshape(rows, heads, -1)
