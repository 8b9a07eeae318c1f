"""The margin of a prefill: how clearly its likeliest next token leads."""

from __future__ import annotations

from math import isfinite

import torch


def top_margins(logits: torch.Tensor) -> torch.Tensor:
    """Return fp32 ``[n]``: by row of ``logits [n, vocab]``, the largest minus the second largest.

    The vocabulary has two tokens at least. Nothing waits for a device.
    """
    first, second = logits.float().topk(2, dim=-1).values.unbind(-1)
    return first - second


def measured(margin: float) -> float | None:
    """Return a margin as a receipt reports it; None if it is no finite number."""
    return margin if isfinite(margin) else None
