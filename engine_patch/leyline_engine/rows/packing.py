"""KV of eight bits, as engines keep it: bytes, of which each is a number."""

from __future__ import annotations

import torch

KV_DTYPES: dict[str, torch.dtype | None] = {"auto": None, "fp8_e4m3": torch.float8_e4m3fn}
"""Dtypes in which KV can be kept, by SGLang's names; None: the model's own."""


def pack(numbers: torch.Tensor, packed: torch.dtype) -> torch.Tensor:
    """Return numbers as bytes: to nearest even, clamped to what ``packed`` can express.

    SGLang divides by the scale of a layer first. A rotation is linear, so the scale cancels between
    :func:`unpack` and this, and the clamp is on the stored numbers.
    """
    limit = torch.finfo(packed).max
    return numbers.clamp(-limit, limit).to(packed).view(torch.uint8)


def unpack(stored: torch.Tensor, packed: torch.dtype) -> torch.Tensor:
    """Return the numbers of bytes, in fp32, without their layer's scale."""
    return stored.view(packed).to(torch.float32)
