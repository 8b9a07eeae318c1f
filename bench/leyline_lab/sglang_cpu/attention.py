"""Causal attention of new tokens over a paged KV cache, in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_BLOCK_ROWS = 256
"""New rows per block: bounds the scores in memory at heads x 256 x sequence length."""


@dataclass(frozen=True)
class Scoring:
    """Weights that a layer gives to what its queries see.

    Args:
        scale: factor on the scores before the softmax.
        window: tokens in front of its own that a query sees; by default all.
        cap: bound of the scores, which approach it by a tanh; 0 for none.
        sinks: ``[heads]``, a score of nothing, which takes its part of the softmax.
    """

    scale: float
    window: int | None = None
    cap: float = 0.0
    sinks: Tensor | None = None

    def weights(self, products: Tensor, hidden: Tensor) -> Tensor:
        """Return the softmax of ``[kv_heads, group, rows, keys]``; the last keys may be hidden,
        by row, bool ``[rows, count]``."""
        scores = products.float().mul_(self.scale)
        if self.cap:
            scores = torch.tanh_(scores.div_(self.cap)).mul_(self.cap)
        last = scores[..., scores.shape[-1] - hidden.shape[-1] :]
        last.masked_fill_(hidden, float("-inf"))
        if self.sinks is None:
            return scores.softmax(-1)
        sinks = self.sinks.float().view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
        return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]


def attend_batch(
    query: Tensor,
    output: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    slots: list[Tensor],
    new_tokens: list[int],
    scoring: Scoring,
    seen: Tensor | None = None,
) -> None:
    """Write the attention of every sequence's last tokens to ``output``.

    Args:
        query: ``[tokens, heads, dim]``, the new tokens of all sequences one after the other.
        output: ``[tokens, heads, value_dim]``, written in place.
        k_cache: ``[pool, kv_heads, dim]``; query head ``h`` reads head ``h * kv_heads // heads``.
        v_cache: ``[pool, kv_heads, value_dim]``.
        slots: per sequence, the pool rows of all its tokens by position; the new ones included.
            Those in front of every new token's window may be left out.
        new_tokens: per sequence, the number of its last tokens in ``query``.
        scoring: of the layer.
        seen: bool ``[sequences, new, new]``: which of a sequence's new tokens each of them attends
            to; by default all but later ones. Equally many are new in each sequence then.
    """
    start = 0
    for number, (sequence, count) in enumerate(zip(slots, new_tokens, strict=True)):
        end = start + count
        keys = k_cache[sequence].to(query.dtype)
        values = v_cache[sequence].to(query.dtype)
        unseen = None if seen is None else ~seen[number]
        _attend(query[start:end], output[start:end], keys, values, scoring, unseen)
        start = end


def _attend(  # noqa: PLR0917
    query: Tensor,
    output: Tensor,
    keys: Tensor,
    values: Tensor,
    scoring: Scoring,
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
        rows, first, last = end - start, length - count + start, length - count + end
        low = 0 if scoring.window is None else max(0, first - scoring.window)
        hidden = _hidden(first, last, scoring.window, unseen)
        block = query[start:end].view(rows, kv_heads, group, dim).permute(1, 2, 0, 3)
        block = block.reshape(kv_heads, group * rows, dim)
        products = torch.bmm(block, keys[:, :, low:last]).view(kv_heads, group, rows, -1)
        weights = scoring.weights(products, hidden).to(values.dtype)
        weights = weights.view(kv_heads, group * rows, -1)
        result = torch.bmm(weights, values[:, low:last]).view(kv_heads, group, rows, -1)
        output[start:end] = result.permute(2, 0, 1, 3).reshape(rows, heads, -1)


def _hidden(first: int, last: int, window: int | None, unseen: Tensor | None) -> Tensor:
    """Return which keys the tokens from ``first`` to ``last`` don't see, bool ``[tokens, keys]``:
    of those tokens themselves, and of the window in front of the first."""
    places = torch.arange(first, last)[:, None]
    if unseen is not None:
        places = first + (~unseen).sum(-1, keepdim=True) - 1
    low = first if window is None else max(0, first - window)
    keys = torch.arange(low, last)
    hidden = keys > places
    if unseen is not None:
        hidden[:, first - low :] = unseen
    return hidden if window is None else hidden | (keys < places - window)
