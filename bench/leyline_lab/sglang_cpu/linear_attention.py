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
from leyline_lab.sglang_cpu.state_space import scan_prompts, scan_tokens

_OPS = "sglang.kernels.ops"


def register_linear_attention() -> None:
    """Let recurrent layers run in this scheduler process."""
    from sglang.srt.layers.attention.mamba import mamba

    replace(_REPLACED)
    # Where it finds no accelerator, it imports neither.
    mamba.causal_conv1d_fn = mamba.causal_conv1d_fn_triton = convolve_prompts
    mamba.causal_conv1d_update = mamba.causal_conv1d_update_triton = convolve_tokens


def convolve_prompts(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    conv_states: Tensor,
    query_start_loc: Tensor,
    cache_indices: Tensor,
    has_initial_state: Tensor | None = None,
    activation: str | bool | None = "silu",
    **_: Any,
) -> Tensor:
    """Convolve sequences that lie one after the other in ``[channels, tokens]``."""
    output = torch.zeros_like(x)
    slots = cache_indices.tolist()
    known = [False] * len(slots) if has_initial_state is None else has_initial_state.tolist()
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
    slots = initial_state_indices.tolist()
    pool = initial_state if inplace_update else initial_state.clone()
    output, states = _delta(q, k, v, g[..., None], beta, pool, slots, cu_seqlens)
    return output, None, torch.cat(states)[None]


def kimi_delta_prompts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    A_log: Tensor | None = None,  # noqa: N803
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    beta_is_raw: bool = False,
    output_intermediate_states: bool = False,
    track_state: Tensor | None = None,
    track_chunk_idx: Tensor | None = None,
    **_: Any,
) -> Any:
    """Do the same with a decay per key, ``g`` ``[1, tokens, heads, dim]``; the gates may still be
    the layer's inputs.

    Writes the states in front of the chunks ``track_chunk_idx``, one of each sequence or -1, to
    ``track_state``. Returns the outputs, and the chunks' states if they are asked for.
    """
    if A_log is not None and dt_bias is not None:
        g = kimi_decays(A_log, g.view(*v.shape[:-1], -1), dt_bias, lower_bound)
    beta = beta.float().sigmoid() if beta_is_raw else beta
    slots = initial_state_indices.tolist()
    output, states = _delta(q, k, v, g, beta, initial_state, slots, cu_seqlens)
    if track_state is not None and track_chunk_idx is not None:
        for row, chunk in enumerate(track_chunk_idx.tolist()):
            if chunk >= 0:
                track_state[row] = states[row][chunk]
    return (output, torch.cat(states)[None]) if output_intermediate_states else output


def kimi_decays(
    A_log: Tensor,  # noqa: N803
    a: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None = None,
) -> Tensor:
    """Return a Kimi Delta Attention's log decays, fp32, of its inputs ``[..., heads, dim]``."""
    steps = a.float() + dt_bias.float().view(a.shape[-2:])
    rate = A_log.float().exp().view(-1, 1)
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(rate * steps)
    return -rate * functional.softplus(steps)


def _delta(  # noqa: PLR0917
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    pool: Tensor,
    slots: list[int],
    starts: Tensor,
) -> tuple[Tensor, list[Tensor]]:
    """Return outputs, and each sequence's states in front of its chunks; the last goes to the
    pool."""
    output, chunks = torch.zeros_like(v), []
    for slot, start, end in zip(slots, *_bounds(starts), strict=True):
        part = slice(start, end)
        query, key = _unit_heads(q[0, part], k[0, part], v.shape[2])
        result, states = recur(
            query,
            key,
            v[0, part].float(),
            log_decay[0, part].float(),
            pool[slot].float().clone(),
            beta[0, part].float(),
        )
        output[0, part] = result.to(v.dtype)
        chunks.append(torch.stack(states)[:-1])
        pool[slot] = states[-1].to(pool.dtype)
    return output, chunks


def delta_tokens(*, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, **where: Any) -> None:  # noqa: N803
    """Run one token of each sequence through the delta rule, as :func:`_delta_tokens`."""
    log_decay, beta = delta_gates(A_log, a, b, dt_bias)
    _delta_tokens(log_decay=log_decay[0, ..., None], beta=beta[0], **where)


def kimi_delta_tokens(
    *,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,  # noqa: N803
    dt_bias: Tensor,
    lower_bound: float | None = None,
    **where: Any,
) -> None:
    """Do the same with a decay per key."""
    beta = b.float().sigmoid()
    log_decay = kimi_decays(A_log, a.view(*beta.shape, -1), dt_bias, lower_bound)
    _delta_tokens(log_decay=log_decay, beta=beta, **where)


def _delta_tokens(
    *,
    mixed_qkv: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    **_: Any,
) -> None:
    """Write ``out``, ``[sequences, 1, heads, value_dim]``; all sequences' heads are computed as
    heads of one."""
    slots = ssm_state_indices.clamp(min=0).long()
    count, (heads, value_dim, dim) = len(slots), initial_state.shape[1:]
    width = (mixed_qkv.shape[1] - heads * value_dim) // 2
    q, k, v = torch.split(mixed_qkv, [width, width, heads * value_dim], -1)
    query, key = _unit_heads(q.view(count, -1, dim), k.view(count, -1, dim), heads)
    result, states = recur(
        query.reshape(1, -1, dim),
        key.reshape(1, -1, dim),
        v.reshape(1, -1, value_dim).float(),
        log_decay.reshape(1, count * heads, -1),
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


def gated_norm(
    x: Tensor,
    g: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str = "swish",
    *,
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    """Return :func:`grouped_norm` of whole rows, then gated."""
    del residual_in_fp32
    if residual is not None or prenorm:
        raise NotImplementedError("a gated norm that adds a residual")
    return grouped_norm(
        x=x, weight=weight, bias=bias, z=g, eps=eps, activation=activation, is_rms_norm=True
    )


def grouped_norm(
    *,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
    activation: str = "swish",
) -> Tensor:
    """Return rows ``[n, dim]`` over the root of their groups' mean square, by weight and gate."""
    if bias is not None or not is_rms_norm:
        raise NotImplementedError("a gated norm with a bias or a mean")
    rows, gate = x.float(), x.new_ones(())
    if z is not None:
        gate = z.float().reshape(x.shape)
        gate = gate.sigmoid() if activation == "sigmoid" else functional.silu(gate)
    if not norm_before_gate:
        rows = rows * gate
    groups = rows.reshape(*x.shape[:-1], -1, group_size or x.shape[-1])
    rows = (groups * torch.rsqrt(groups.square().mean(-1, True) + eps)).flatten(-2)
    rows = rows * weight.float()
    return (rows * gate if norm_before_gate else rows).to(x.dtype)


def gated(attended: Tensor, gate: Tensor, inplace: bool = False, quant: bool = False) -> Tensor:
    """Return attention ``[tokens, dim]`` by its gates, of that many numbers."""
    del inplace, quant
    return attended * torch.sigmoid(gate.reshape(attended.shape))


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
    "sglang.srt.layers.attention.mamba.causal_conv1d": {
        "causal_conv1d_fn": convolve_prompts,
        "causal_conv1d_update": convolve_tokens,
    },
    f"{_OPS}.mamba.mamba_state_scatter_triton": {
        "track_mamba_states_if_needed": copy_tracked,
        "track_mamba_states_all_layers": copy_all_tracked,
    },
    f"{_OPS}.mamba.triton_ops.ssd_combined": {"mamba_chunk_scan_combined": scan_prompts},
    f"{_OPS}.mamba.triton_ops.ssu_dispatch": {"selective_state_update": scan_tokens},
    f"{_OPS}.attention.linear.fused_gdn_gating": {"fused_gdn_gating": delta_gates},
    f"{_OPS}.attention.fla.chunk": {"chunk_gated_delta_rule": delta_prompts},
    f"{_OPS}.attention.fla.fused_recurrent": {
        "fused_recurrent_gated_delta_rule_packed_decode": delta_tokens,
        "fused_recurrent_kda_packed_decode": kimi_delta_tokens,
    },
    f"{_OPS}.attention.fla.kda": {"chunk_kda": kimi_delta_prompts},
    f"{_OPS}.attention.fla.fused_norm_gate": {"rms_norm_gated": gated_norm},
    f"{_OPS}.attention.fla.layernorm_gated": {"rms_norm_gated": grouped_norm},
    f"{_OPS}.attention.triton_gdn_fused_proj": {
        "fused_qkvzba_split_reshape_cat": split_projections,
        "fused_qkvzba_split_reshape_cat_contiguous": split_flat_projections,
    },
    f"{_OPS}.elementwise.elementwise": {
        "fused_sigmoid_mul": gated,
        "fused_gate_sigmoid_mul": gated_share,
        "fused_gate_sigmoid_mul_add": add_gated_share,
    },
}
