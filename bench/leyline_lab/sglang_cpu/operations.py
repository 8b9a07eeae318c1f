"""PyTorch in place of SGLang's Triton kernels: experts, adapters, and other operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

Forward = Callable[[Any, Tensor, Any, Any], Tensor]


def register_experts() -> None:
    """Let SGLang's plain experts skip those that other ranks hold, and do without gates."""
    from sglang.srt.layers.moe import fused_moe_native

    gated = fused_moe_native.moe_forward_native

    def forward(layer: Any, hidden: Tensor, chosen: Any, config: Any) -> Tensor:
        run = apply_ungated if config.activation == "relu2" else gated
        return run(layer, hidden, chosen, config)

    fused_moe_native.moe_forward_native = _of_local_experts(forward)


def apply_ungated(layer: Any, hidden: Tensor, chosen: Any, _: Any) -> Tensor:
    """Apply experts of two matrices with a squared ReLU in between, as Nemotron has them."""
    result = torch.zeros_like(hidden)
    for expert in chosen.topk_ids.unique().tolist():
        rows, places = torch.nonzero(chosen.topk_ids == expert, as_tuple=True)
        inner = (hidden[rows] @ layer.w13_weight[expert].T).relu().square()
        weights = chosen.topk_weights[rows, places, None].to(hidden.dtype)
        result.index_add_(0, rows, weights * (inner @ layer.w2_weight[expert].T))
    return result


def _of_local_experts(forward: Forward) -> Forward:
    """Return a forward of experts to which a token may name experts of other ranks, as -1.

    SGLang's own takes every number for an expert of its layer.
    """

    def forward_local(layer: Any, hidden: Tensor, chosen: Any, config: Any) -> Tensor:
        if not bool((chosen.topk_ids < 0).any()):
            return forward(layer, hidden, chosen, config)
        result = torch.zeros_like(hidden)
        for expert in chosen.topk_ids[chosen.topk_ids >= 0].unique().tolist():
            rows, places = torch.nonzero(chosen.topk_ids == expert, as_tuple=True)
            alone = chosen._replace(
                topk_weights=chosen.topk_weights[rows, places, None],
                topk_ids=chosen.topk_ids[rows, places, None],
            )
            result.index_add_(0, rows, forward(layer, hidden[rows], alone, config))
        return result

    return forward_local


def register_adapters() -> None:
    """Let SGLang's modules for adapters make tensors on a machine without pinned memory."""
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend

    for module in (layers, torch_backend):
        module.torch = _Unpinned(module.torch)
    Tensor.pin_memory = _as_it_is  # type: ignore[method-assign,assignment]


class _Unpinned(ModuleType):
    """PyTorch, but that no tensor is made in pinned memory, which only an accelerator brings."""

    def __init__(self, torch: ModuleType) -> None:
        super().__init__(torch.__name__)
        self._torch = torch
        for name in ("empty", "tensor", "zeros"):
            setattr(self, name, partial(_unpinned, getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)


def _unpinned(
    make: Callable[..., Any], *args: Any, pin_memory: bool = False, **options: Any
) -> Any:
    del pin_memory
    return make(*args, **options)


def _as_it_is(tensor: Tensor, *_: object) -> Tensor:
    return tensor


def register_operations() -> None:
    """Replace what some models call in this process.

    SGLang imports every model's module anyway, to know their classes.
    """
    from sglang.srt.layers import attn_residual, logits_processor
    from sglang.srt.layers.moe import topk
    from sglang.srt.models import kimi_k3, minimax_m2

    topk.fused_topk_native = _with_flat_bias(topk.fused_topk_native)
    kimi_k3._is_hip = True  # as on ROCm, it makes no streams
    minimax_m2.rms_sumsq_serial = sums_of_squares
    minimax_m2.rms_apply_serial = normalize_both
    attn_residual._mix_fused = attn_residual.aggregate_stream_torch
    logits_processor.fused_softcap = cap
    torch.library.impl("aten::mm.dtype", "cpu", multiply)


def cap(logits: Tensor, largest: float) -> Tensor:
    """Bring logits into ``[-largest, largest]``, in place."""
    return logits.div_(largest).tanh_().mul_(largest)


def multiply(first: Tensor, second: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Return a product of matrices in another dtype, which PyTorch computes on GPUs alone."""
    return first.to(out_dtype) @ second.to(out_dtype)


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
