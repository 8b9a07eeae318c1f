"""A model's rotary facts, read from its own rotary modules in SGLang and measured on them.

A probe key is turned by the module at several positions; exactly one pairing must explain the
result. The frequencies are those that the module computes for itself, and its cached cosines and
sines must be theirs, up to the last position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch

from leyline_engine.contract import RotaryFacts
from leyline_engine.rotation import Pairing, Rotary

_POSITIONS = (0, 1, 977, 4093)
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Tolerance of a turned key, as a share of its largest element."""
_TABLE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Tolerance of a cached cosine, which fp32 angles of long positions alone make uncertain."""


class UnsupportedRotaryError(Exception):
    """Keys can't be moved by the model's form of rotary embedding."""


@dataclass(frozen=True, slots=True)
class _Kind:
    rope_type: str
    inv_freq: Callable[[Any], torch.Tensor]


def _of_base(module: Any) -> torch.Tensor:
    return module._compute_inv_freq(module.base)  # type: ignore[no-any-return]


def _of_factor(module: Any) -> torch.Tensor:
    return module._compute_inv_freq(module.scaling_factor)  # type: ignore[no-any-return]


def _linear(module: Any) -> torch.Tensor:
    if len(module.scaling_factors) != 1:
        raise UnsupportedRotaryError("several linear scaling factors")
    return _of_base(module) / float(module.scaling_factors[0])


_PACKAGE = "sglang.srt.layers.rotary_embedding"
_KINDS: Mapping[str, _Kind] = {
    f"{_PACKAGE}.base.RotaryEmbedding": _Kind("default", _of_base),
    f"{_PACKAGE}.base.LinearScalingRotaryEmbedding": _Kind("linear", _linear),
    f"{_PACKAGE}.rope_variant.Llama3RotaryEmbedding": _Kind("llama3", _of_base),
    f"{_PACKAGE}.yarn.YaRNScalingRotaryEmbedding": _Kind("yarn", _of_factor),
    f"{_PACKAGE}.rope_variant.DeepseekScalingRotaryEmbedding": _Kind("yarn", _of_factor),
}
"""Kinds by exact class: a subclass may turn keys otherwise (M-RoPE, dynamic NTK, dual chunk, …)."""


def measure_rotary(
    modules: Iterable[object], dtype: torch.dtype, device: torch.device
) -> tuple[Rotary, RotaryFacts]:
    """Measure the rotary modules of a model's layers; they must all do the same.

    Args:
        modules: one per layer, or as many as there are.
        dtype: dtype in which the model passes keys to them.
        device: device of the model.

    Raises:
        UnsupportedRotaryError: a class is unknown, modules differ, or one doesn't turn keys by its
        own frequencies.
    """
    distinct = list({id(module): module for module in modules}.values())
    if not distinct or any(module is None for module in distinct):
        raise UnsupportedRotaryError("layers without a rotary embedding")
    measured = [_measure(module, dtype, device) for module in distinct]
    rotary, facts = measured[0]
    if any(other != facts for _, other in measured[1:]):
        raise UnsupportedRotaryError("the layers' rotary embeddings differ")
    return rotary, facts


def _measure(module: Any, dtype: torch.dtype, device: torch.device) -> tuple[Rotary, RotaryFacts]:
    kind = _KINDS.get(f"{type(module).__module__}.{type(module).__qualname__}")
    if kind is None:
        raise UnsupportedRotaryError(f"rotary embedding {type(module).__qualname__}")
    inv_freq = kind.inv_freq(module).detach().to(device, torch.float32)
    scaling = float(getattr(module, "mscale", 1.0))
    if 2 * inv_freq.numel() != module.rotary_dim:
        raise UnsupportedRotaryError("as many frequencies as rotary pairs are needed")
    _check_table(module.cos_sin_cache, inv_freq, scaling)
    last = int(module.cos_sin_cache.shape[0]) - 1
    positions = torch.tensor(sorted({min(p, last) for p in _POSITIONS}), device=device)
    before, after = _probe(module, positions, dtype, device)
    proven = [
        pairing
        for pairing in Pairing
        if _explains(Rotary(inv_freq, pairing), scaling, positions, before, after)
    ]
    if len(proven) != 1:
        raise UnsupportedRotaryError("no one rotation explains how the keys turn")
    rotary = Rotary(inv_freq, proven[0])
    digest = blake2b(inv_freq.cpu().numpy().tobytes(), digest_size=8).hexdigest()
    return rotary, RotaryFacts(
        rope_type=kind.rope_type,
        pairing=str(rotary.pairing),
        rotary_dim=rotary.dim,
        inv_freq_digest=digest,
        attention_scaling=scaling,
    )


def _check_table(table: torch.Tensor, inv_freq: torch.Tensor, scaling: float) -> None:
    """Check that the cached ``[positions, cos | sin]`` is that of ``inv_freq``."""
    last = int(table.shape[0]) - 1
    rows = torch.tensor(sorted({0, 1, last // 3, last}), device=table.device)
    angles = rows.to(torch.float32)[:, None] * inv_freq.to(table.device)[None, :]
    wanted = scaling * torch.cat((angles.cos(), angles.sin()), dim=-1)
    # One step of fp32 in a frequency moves the angle of position p by p times that.
    slack = _TABLE_TOLERANCE.get(table.dtype, 0.0) + last * 2**-22
    if not float((table[rows].float() - wanted).abs().max()) <= slack * abs(scaling):
        raise UnsupportedRotaryError("cached cosines aren't those of the module's frequencies")


def _probe(
    module: Any, positions: torch.Tensor, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a random key ``[1, 1, head_size]``, and the module's turns of it."""
    generator = torch.Generator().manual_seed(1)
    key = torch.randn(1, 1, int(module.head_size), generator=generator).to(device, dtype)
    keys = key.repeat(len(positions), 1, 1)
    with torch.inference_mode():
        _, turned = module(positions, keys.clone(), keys.clone())
    return key, turned.reshape(keys.shape)


def _explains(
    rotary: Rotary,
    scaling: float,
    positions: torch.Tensor,
    before: torch.Tensor,
    after: torch.Tensor,
) -> bool:
    """Return True if ``after`` is ``before`` turned to ``positions``, and the rest unchanged."""
    dtype = before.dtype
    wide = before.to(torch.float32).repeat(len(positions), 1, 1)
    wanted = wide.clone()
    origin = torch.zeros_like(positions)
    wanted[..., : rotary.dim] = scaling * rotary.rotate(wide[..., : rotary.dim], origin, positions)
    error = (after.to(torch.float32) - wanted).abs().max()
    return bool(error <= _TOLERANCE.get(dtype, 0.0) * wanted.abs().max())
