"""Selective state spaces (Mamba, Mamba2) in plain PyTorch, by SGLang's names for its kernels."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from leyline_lab.sglang_cpu.recurrence import recur


def scan_prompts(  # noqa: PLR0917 - SGLang calls it like this
    x: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    chunk_size: int,
    *,
    D: Tensor,  # noqa: N803
    dt_bias: Tensor,
    cu_seqlens: Tensor,
    out: Tensor,
    initial_states: Tensor | None = None,
    track_end_locs: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run sequences that lie one after the other in ``[1, tokens, heads, dim]`` through Mamba2.

    Args:
        x: ``[1, tokens, heads, value_dim]``.
        dt: steps ``[1, tokens, heads]`` in front of bias and softplus.
        A: ``[heads]``, negative.
        B: ``[1, tokens, groups, dim]``, written to the state.
        C: the same, reads the state.
        chunk_size: tokens between states that are returned.
        D: ``[heads]``, the part of ``x`` that goes to the output as it is.
        dt_bias: ``[heads]``.
        cu_seqlens: where each sequence begins, and the end.
        out: like ``x``, written in place.
        initial_states: ``[sequences, heads, value_dim, dim]``; by default zeros.
        track_end_locs: places in the batch whose states are returned, too.

    Returns:
        the states at every ``chunk_size``-th place of the batch, ``[1, chunks, ...]``; at each
        sequence's end; and at the named places, ``[1, places, ...]``.
    """
    heads, value_dim = x.shape[2:]
    steps = functional.softplus(dt[0].float() + dt_bias.float())
    query, key = (y[0].float().repeat_interleave(heads // y.shape[2], 1) for y in (C, B))
    value = x[0].float() * steps[..., None]
    log_decay = (steps * A.float())[..., None]
    named = [] if track_end_locs is None else track_end_locs.tolist()
    grid = range(0, x.shape[1], chunk_size)
    states: dict[int, Tensor] = {}
    ends, zeros = [], value.new_zeros(heads, value_dim, key.shape[-1])
    for row, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        state = zeros if initial_states is None else initial_states[row].float()
        inside = {place for place in (*grid, *named) if start < place < end}
        states[start] = state
        for first, last in pairwise(sorted({start, end} | inside)):
            part = slice(first, last)
            result, (*_states, state) = recur(
                query[part], key[part], value[part], log_decay[part], state
            )
            states[last] = state
            out[0, part] = (result + x[0, part].float() * D.float()[:, None]).to(out.dtype)
        ends.append(state)
    found = torch.stack([states[place] for place in named])[None] if named else None
    return torch.stack([states[place] for place in grid])[None], torch.stack(ends), found


def scan_tokens(  # noqa: PLR0917 - SGLang calls it like this
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    D: Tensor,  # noqa: N803
    z: Tensor | None = None,
    *,
    dt_bias: Tensor,
    state_batch_indices: Tensor,
    out: Tensor,
    **_: Any,
) -> None:
    """Run one token of each sequence through Mamba2, or Mamba with a single head.

    Args:
        state: the pool, ``[slots, heads, value_dim, dim]``.
        x: ``[sequences, heads, value_dim]``.
        dt: steps of the same shape in front of bias and softplus.
        A: ``[heads, value_dim, dim]``, negative.
        B: ``[sequences, groups, dim]``.
        C: the same.
        D: ``[heads, value_dim]``.
        z: gates like ``x``.
        dt_bias: ``[heads, value_dim]``.
        state_batch_indices: the sequences' slots; a row that pads the batch has none.
        out: like ``x``, written in place.
    """
    slots = state_batch_indices.clamp(min=0).long()
    heads = x.shape[1]
    steps = functional.softplus(dt.float() + dt_bias.float())[..., None]
    read, key = (y.float().repeat_interleave(heads // y.shape[1], 1)[:, :, None] for y in (C, B))
    after = state[slots].float() * (steps * A.float()).exp()
    after += steps * x.float()[..., None] * key
    state[slots] = after.to(state.dtype)
    result = (after * read).sum(-1) + x.float() * D.float()
    out.copy_(result if z is None else result * functional.silu(z.float()))
