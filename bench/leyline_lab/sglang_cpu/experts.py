"""Experts of expert-parallel ranks on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Forward = Callable[[Any, Tensor, Any, Any], Tensor]


def register_experts() -> None:
    """Let SGLang's plain experts skip those that other ranks hold."""
    from sglang.srt.layers.moe import fused_moe_native

    forward = fused_moe_native.moe_forward_native
    fused_moe_native.moe_forward_native = _of_local_experts(forward)


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
