"""Operations of single models that SGLang has for accelerators alone, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def register_operations() -> None:
    """Replace what some models call in this process.

    SGLang imports every model's module anyway, to know their classes.
    """
    from sglang.srt.layers.moe import topk
    from sglang.srt.models import minimax_m2

    topk.fused_topk_native = _with_flat_bias(topk.fused_topk_native)
    minimax_m2.rms_sumsq_serial = sums_of_squares
    minimax_m2.rms_apply_serial = normalize_both


def _with_flat_bias(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap SGLang's choice of experts: a bias may be ``[1, experts]``, as Ernie's is."""

    def choose(*args: Any, correction_bias: Tensor | None = None, **kwargs: Any) -> Any:
        flat = None if correction_bias is None else correction_bias.flatten()
        return original(*args, correction_bias=flat, **kwargs)

    return choose


def sums_of_squares(first: Tensor, second: Tensor) -> Tensor:
    """Return the sums of squares of rows of two tensors ``[n, d]``, one after the other.

    Returns:
        fp32 ``[2n]``, with zeros up to a multiple of 4: ranks add them up.
    """
    sums = torch.cat([part.float().square().sum(dim=-1) for part in (first, second)])
    return torch.nn.functional.pad(sums, (0, -len(sums) % 4))


def normalize_both(  # noqa: PLR0917 - SGLang calls it like this
    first: Tensor,
    second: Tensor,
    first_weight: Tensor,
    second_weight: Tensor,
    sums: Tensor,
    ranks: int = 1,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Return two tensors ``[n, d]``, each divided by the root of its rows' mean square.

    Args:
        first: this rank's dimensions of the first tensor.
        second: those of the second.
        first_weight: factors ``[d]``.
        second_weight: factors ``[d]``.
        sums: :func:`sums_of_squares` over all ranks.
        ranks: number of ranks that hold dimensions.
        eps: added to the mean square.
    """

    def normalized(rows: Tensor, weight: Tensor, squares: Tensor) -> Tensor:
        mean = squares[:, None] / rows.shape[-1] / ranks
        return (rows.float() * torch.rsqrt(mean + eps) * weight.float()).to(rows.dtype)

    count = len(first)
    return (
        normalized(first, first_weight, sums[:count]),
        normalized(second, second_weight, sums[count : 2 * count]),
    )
