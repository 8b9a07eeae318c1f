"""The rotation of a draft model's keys, measured on its rotary modules alone.

A draft can't be probed as :mod:`.probe` probes a model: it needs the model's hidden states. A wrong
turn would cost accepted drafts, and never change a token, as the model verifies each.
"""

from __future__ import annotations

from typing import Any

import torch

from leyline_engine.rotary.explained_keys import (
    Frequencies,
    ProbedLayer,
    UnsupportedRotaryError,
    explain,
)
from leyline_engine.rotary.rotation import ModelRotary
from leyline_engine.rotary.tables import read_frequencies, rotary_modules

_POSITIONS = (0, 1, 17, 977, 4093)


def measure_modules(model: torch.nn.Module, longest: int, dtype: torch.dtype) -> ModelRotary:
    """Return the one rotation that a model's rotary modules apply, on the CPU.

    Args:
        model: a draft.
        longest: number of positions that are used.
        dtype: dtype in which the model passes keys to them.

    Raises:
        UnsupportedRotaryError: there is none, they differ, or one doesn't do what its table says.
    """
    modules = rotary_modules(model)
    if not modules:
        raise UnsupportedRotaryError("layers without a rotary embedding")
    read = {each.key: each for each in (read_frequencies(m, longest) for m in modules)}
    if len(read) > 1:
        raise UnsupportedRotaryError("the layers' rotary embeddings differ")
    (frequencies,) = read.values()
    last = min(longest, *(int(module.cos_sin_cache.shape[0]) for module in modules)) - 1
    positions = torch.tensor(sorted({min(position, last) for position in _POSITIONS}))
    turned = [_turned(module, positions, frequencies, dtype) for module in modules]
    explained = explain(turned, positions, [frequencies], dtype)
    if explained.start:
        raise UnsupportedRotaryError("a band that isn't at the key's beginning")
    return explained.rotary


def _turned(
    module: Any, positions: torch.Tensor, frequencies: Frequencies, dtype: torch.dtype
) -> ProbedLayer:
    """Return a random key as a module turns it to every position."""
    table = module.cos_sin_cache
    width = int(getattr(module, "head_size", 2 * frequencies.inv_freq.numel()))
    key = torch.randn(1, 1, width, generator=torch.Generator().manual_seed(1))
    keys = key.to(table.device, dtype).repeat(len(positions), 1, 1)
    with torch.inference_mode():
        _, turned = module(positions.to(table.device), keys.clone(), keys.clone())
    return ProbedLayer(turned.reshape(keys.shape)[None].to("cpu", torch.float32), None)
