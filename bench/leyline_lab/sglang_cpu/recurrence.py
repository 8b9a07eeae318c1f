"""Gated linear recurrences and causal convolutions of one or more sequences, in plain PyTorch.

The state of a head is a matrix ``S`` of values by keys. Each token decays it, writes to it, and
reads it: ``S = S * decay + u k^T``, ``o = S q``. Under the delta rule (Gated DeltaNet, Kimi Delta
Attention) ``u = beta * (v - (S * decay) k)``, otherwise (Mamba2, lightning attention) ``u = v``.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 64
"""Tokens that are computed at once: the grid on which SGLang takes states out of a prefill."""


def recur(  # noqa: PLR0917
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    state: Tensor,
    beta: Tensor | None = None,
    *,
    chunk: int = CHUNK,
) -> tuple[Tensor, list[Tensor]]:
    """Run one sequence through a recurrence.

    Args:
        query: fp32 ``[tokens, heads, dim]``.
        key: the same.
        value: fp32 ``[tokens, heads, value_dim]``.
        log_decay: fp32 ``[tokens, heads, 1]``, or ``[tokens, heads, dim]`` with a decay per key.
        state: fp32 ``[heads, value_dim, dim]`` in front of the first token.
        beta: fp32 ``[tokens, heads]`` of the delta rule; without it tokens write their values.
        chunk: tokens that are computed at once.

    Returns:
        outputs ``[tokens, heads, value_dim]``, and the states in front of every chunk and at the
        end.
    """
    outputs, states = [], [state]
    for start in range(0, len(value), chunk):
        part = slice(start, start + chunk)
        output, state = _recur_chunk(
            query[part],
            key[part],
            value[part],
            log_decay[part],
            state,
            None if beta is None else beta[part],
        )
        outputs.append(output)
        states.append(state)
    return torch.cat(outputs) if outputs else torch.empty_like(value), states


def _recur_chunk(  # noqa: PLR0917
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, state: Tensor, beta: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Solve a chunk as a linear system (2412.06464, section 3.3)."""
    total = log_decay.cumsum(0)
    count = len(value)
    later = torch.ones(count, count, dtype=torch.bool).triu_(1)[..., None, None]
    between = (total[:, None] - total[None]).masked_fill_(later, float("-inf")).exp_()
    written = value.transpose(0, 1)  # [heads, tokens, value_dim]
    if beta is not None:
        gain = beta.T[..., None]
        carried = torch.einsum("hvk,thk->htv", state, key * total.exp())
        mixed = gain * _products(key, key, between)
        written = torch.linalg.solve_triangular(
            mixed, gain * (written - carried), upper=False, unitriangular=True
        )
    output = torch.einsum("hvk,thk->htv", state, query * total.exp())
    output = output + _products(query, key, between) @ written
    kept = key * (total[-1] - total).exp()
    state = state * total[-1, :, None].exp() + torch.einsum("htv,thk->hvk", written, kept)
    return output.transpose(0, 1), state


def _products(left: Tensor, right: Tensor, factors: Tensor) -> Tensor:
    """Return ``[heads, tokens, tokens]``: products of all pairs, each dimension
    by the pair's factor."""
    if factors.shape[-1] == 1:
        return torch.einsum("ihk,jhk->hij", left, right) * factors[..., 0].permute(2, 0, 1)
    return torch.einsum("ihk,jhk,ijhk->hij", left, right, factors)


def convolve(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run sequences of equally many new tokens through a causal convolution of each channel.

    Args:
        inputs: ``[sequences, channels, tokens]``.
        weight: ``[channels, width]``.
        bias: ``[channels]``.
        state: ``[sequences, channels, width - 1]``, the inputs in front of the first one.

    Returns:
        outputs of the inputs' shape, and the state after the last token.
    """
    seen = torch.cat((state.to(inputs.dtype), inputs), -1)
    outputs = torch.nn.functional.conv1d(
        seen, weight[:, None].to(inputs.dtype), bias, groups=len(weight)
    )
    return outputs, seen[..., seen.shape[-1] - state.shape[-1] :]
