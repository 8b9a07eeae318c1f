"""Recurrent layers in plain PyTorch: what SGLang computes in Triton kernels, by the same names.

States lie in pools, ``[slots, ...]``; a sequence's are read from its slot and written back to it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from leyline_lab.sglang_cpu.recurrence import convolve, recur
from leyline_lab.sglang_cpu.replacement import Replacements, replace

_OPS = "sglang.kernels.ops"


def register_linear_attention() -> None:
    """Let recurrent layers run in this scheduler process."""
    replace(_REPLACED)


def convolve_prompts(  # noqa: PLR0917 - SGLang calls it like this
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    seq_lens_cpu: Any = None,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    activation: str | bool | None = "silu",
    **_: Any,
) -> Tensor:
    """Convolve sequences that lie one after the other in ``[channels, tokens]``."""
    del seq_lens_cpu
    output = torch.zeros_like(x)
    count = len(query_start_loc) - 1
    slots = range(count) if cache_indices is None else cache_indices.tolist()
    known = [False] * count if has_initial_state is None else has_initial_state.tolist()
    for slot, kept, start, end in zip(slots, known, *_bounds(query_start_loc), strict=True):
        if start == end:
            continue
        state = conv_states[slot] if kept else torch.zeros_like(conv_states[slot])
        part, state = convolve(x[None, :, start:end], weight, bias, state[None])
        output[:, start:end] = _activated(part[0], activation)
        conv_states[slot] = state[0].to(conv_states.dtype)
    return output


def convolve_tokens(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | bool | None = None,
    *,
    conv_state_indices: Tensor,
) -> Tensor:
    """Convolve one token of each sequence, ``[sequences, channels]``.

    Rows that pad a batch name no slot; slot 0 is no sequence's.
    """
    slots = conv_state_indices.clamp(min=0).long()
    output, state = convolve(x[..., None], weight, bias, conv_state[slots])
    conv_state[slots] = state.to(conv_state.dtype)
    return _activated(output[..., 0], activation)


def _activated(values: Tensor, activation: str | bool | None) -> Tensor:
    return functional.silu(values) if activation in {True, "silu", "swish"} else values


def delta_gates(  # noqa: PLR0917 - SGLang calls it like this
    A_log: Tensor,  # noqa: N803
    a: Tensor,
    b: Tensor,
    dt_bias: Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
) -> tuple[Tensor, Tensor]:
    """Return a Gated DeltaNet's log decays and betas, fp32 ``[1, tokens, heads]``, of its inputs
    ``[tokens, heads]``."""
    steps = functional.softplus(a.float() + dt_bias.float(), beta, threshold)
    return (-A_log.float().exp() * steps)[None], b.float().sigmoid()[None]


def delta_prompts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    inplace_update: bool = True,
    **_: Any,
) -> tuple[Tensor, None, Tensor]:
    """Run sequences that lie one after the other in ``[1, tokens, heads, dim]`` through the delta
    rule.

    Returns:
        outputs, nothing, and the states in front of every chunk of every sequence,
        ``[1, chunks, heads, value_dim, dim]``.
    """
    output = torch.zeros_like(v)
    chunks: list[Tensor] = []
    for slot, start, end in zip(initial_state_indices.tolist(), *_bounds(cu_seqlens), strict=True):
        part = slice(start, end)
        query, key = _unit_heads(q[0, part], k[0, part], v.shape[2])
        result, states = recur(
            query,
            key,
            v[0, part].float(),
            g[0, part].float().view(end - start, v.shape[2], -1),
            initial_state[slot].float().clone(),
            beta[0, part].float(),
        )
        output[0, part] = result.to(v.dtype)
        chunks += states[:-1]
        if inplace_update:
            initial_state[slot] = states[-1].to(initial_state.dtype)
    empty = initial_state.new_zeros((0, *initial_state.shape[1:]))
    return output, None, (torch.stack(chunks) if chunks else empty)[None]


def delta_tokens(
    *,
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,  # noqa: N803
    dt_bias: Tensor,
    initial_state: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    **_: Any,
) -> None:
    """Run one token of each sequence through the delta rule; writes ``out``, ``[sequences, 1,
    heads, value_dim]``.

    All sequences' heads are computed as heads of one.
    """
    slots = ssm_state_indices.clamp(min=0).long()
    count, (heads, value_dim, dim) = len(slots), initial_state.shape[1:]
    width = (mixed_qkv.shape[1] - heads * value_dim) // 2
    q, k, v = torch.split(mixed_qkv, [width, width, heads * value_dim], -1)
    query, key = _unit_heads(q.view(count, -1, dim), k.view(count, -1, dim), heads)
    log_decay, beta = delta_gates(A_log, a, b, dt_bias)
    result, states = recur(
        query.reshape(1, -1, dim),
        key.reshape(1, -1, dim),
        v.reshape(1, -1, value_dim).float(),
        log_decay.reshape(1, -1, 1),
        initial_state[slots].float().flatten(0, 1),
        beta.reshape(1, -1),
    )
    initial_state[slots] = states[-1].view(count, heads, value_dim, dim).to(initial_state.dtype)
    out[:, 0] = result.view(count, heads, value_dim).to(out.dtype)


def _unit_heads(q: Tensor, k: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Return queries and keys of length 1, fp32, for each of a value's heads; queries scaled."""
    unit = [x.float() * torch.rsqrt(x.float().square().sum(-1, True) + 1e-6) for x in (q, k)]
    query, key = (x.repeat_interleave(heads // x.shape[-2], -2) for x in unit)
    return query * q.shape[-1] ** -0.5, key


def _bounds(starts: Tensor) -> tuple[list[int], list[int]]:
    """Return where each sequence begins and ends."""
    places = starts.tolist()
    return places[:-1], places[1:]


def split_projections(  # noqa: PLR0917 - SGLang calls it like this
    mixed_qkvz: Tensor, mixed_ba: Tensor, key_heads: int, heads: int, dim: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a layer's queries, keys and values in one row per token, and z, b and a by head.

    Both inputs hold one key head's parts after another's: ``[tokens, key_heads * ...]``.
    """
    count, ratio = len(mixed_qkvz), heads // key_heads
    widths = [dim, dim, ratio * value_dim, ratio * value_dim]
    *qkv, z = torch.split(mixed_qkvz.view(count, key_heads, -1), widths, -1)
    b, a = torch.split(mixed_ba.view(count, key_heads, -1), [ratio, ratio], -1)
    rows = torch.cat([part.reshape(count, -1) for part in qkv], -1)
    return rows, z.reshape(count, heads, value_dim), b.reshape(count, -1), a.reshape(count, -1)


def split_flat_projections(  # noqa: PLR0917
    mixed_qkvz: Tensor, mixed_ba: Tensor, key_heads: int, heads: int, dim: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Do the same with inputs that hold all heads' queries, then all heads' keys, and so on."""
    count = len(mixed_qkvz)
    rows, z = torch.split(
        mixed_qkvz, [2 * key_heads * dim + heads * value_dim, heads * value_dim], -1
    )
    b, a = torch.split(mixed_ba, [heads, heads], -1)
    return rows.contiguous(), z.reshape(count, heads, value_dim), b.contiguous(), a.contiguous()


def gated_norm(  # noqa: PLR0917 - SGLang calls it like this
    x: Tensor,
    g: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    """Return rows ``[n, dim]`` over the root of their mean square, by weight and gate."""
    del residual_in_fp32
    if bias is not None or residual is not None or prenorm:
        raise NotImplementedError("a gated norm with a bias or a residual")
    rows, gate = x.float(), g.float()
    rows = rows * torch.rsqrt(rows.square().mean(-1, True) + eps) * weight.float()
    gate = gate.sigmoid() if activation == "sigmoid" else functional.silu(gate)
    return (rows * gate).to(x.dtype)


def gated_share(hidden: Tensor, gate: Tensor, shared: Tensor) -> Tensor:
    """Return a shared expert's output ``[tokens, dim]`` by its gate: ``sigmoid(hidden @ gate)``."""
    return torch.sigmoid(hidden.float() @ gate.float())[:, None].to(shared.dtype) * shared


def add_gated_share(hidden: Tensor, gate: Tensor, shared: Tensor, total: Tensor) -> None:
    """Add :func:`gated_share` to ``total``."""
    total += gated_share(hidden, gate, shared)


def copy_tracked(  # noqa: PLR0917 - SGLang calls it like this
    conv_states: Tensor,
    ssm_states: Tensor,
    slots: Tensor,
    mask: Tensor,
    targets: Tensor,
    count: int,
    check_freed_slots: bool = False,
) -> None:
    """Copy states of the sequences that ``mask`` names to slots in which the tree keeps them."""
    del check_freed_slots
    slots, targets = slots[:count].long(), targets[:count].long()
    chosen = mask[:count] & (slots >= 0) & (targets >= 0)
    for states in (conv_states, ssm_states):
        states[targets[chosen]] = states[slots[chosen]]


def copy_all_tracked(conv_states: Tensor, ssm_states: Tensor, *where: Any, **options: Any) -> None:
    """Do the same in the pools of all layers, ``[layers, slots, ...]``."""
    copy_tracked(conv_states.transpose(0, 1), ssm_states.transpose(0, 1), *where, **options)


_REPLACED: Replacements = {
    f"{_OPS}.mamba.causal_conv1d_triton": {
        "causal_conv1d_fn": convolve_prompts,
        "causal_conv1d_update": convolve_tokens,
    },
    f"{_OPS}.mamba.mamba_state_scatter_triton": {
        "track_mamba_states_if_needed": copy_tracked,
        "track_mamba_states_all_layers": copy_all_tracked,
    },
    f"{_OPS}.attention.linear.fused_gdn_gating": {"fused_gdn_gating": delta_gates},
    f"{_OPS}.attention.fla.chunk": {"chunk_gated_delta_rule": delta_prompts},
    f"{_OPS}.attention.fla.fused_recurrent": {
        "fused_recurrent_gated_delta_rule_packed_decode": delta_tokens
    },
    f"{_OPS}.attention.fla.fused_norm_gate": {"rms_norm_gated": gated_norm},
    f"{_OPS}.attention.triton_gdn_fused_proj": {
        "fused_qkvzba_split_reshape_cat": split_projections,
        "fused_qkvzba_split_reshape_cat_contiguous": split_flat_projections,
    },
    f"{_OPS}.elementwise.elementwise": {
        "fused_gate_sigmoid_mul": gated_share,
        "fused_gate_sigmoid_mul_add": add_gated_share,
    },
}
