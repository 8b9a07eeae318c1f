"""The explanation of a model's cached keys by one rotation.

One token alone in its sequence attends to itself, so nothing that its layers compute depends on
its position, except by the rotary embedding. Its cached rows at several positions must therefore
differ by one rotation of one band of the key, the same in every layer, and by nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import torch

from leyline_engine.rotation import Pairing, Rotary
from leyline_engine.sglang.facts.frequencies import Frequencies, UnsupportedRotaryError

TOLERANCE = {
    torch.float32: 1e-4,
    torch.float16: 3e-3,
    torch.bfloat16: 2e-2,
    torch.float8_e4m3fn: 1e-1,
}
"""Tolerance of a turned key by the coarsest dtype that it went through: the root of the mean
square error, as a share of the key's. An e4m3 key is off by 3.7 %, and so is the one it is turned
from."""


@dataclass(frozen=True, slots=True)
class ProbedLayer:
    """The cached rows of a few tokens, each at every probe position, in one layer."""

    keys: torch.Tensor
    """fp32 ``[tokens, positions, heads, dim]``."""
    values: torch.Tensor | None
    """The same of values; None if a key's row holds everything (MLA)."""


@dataclass(frozen=True, slots=True)
class Explained:
    """The one rotation that explains the keys of every layer."""

    frequencies: Frequencies
    rotary: Rotary
    """On the CPU."""
    start: int
    """First of the key's dimensions that turn."""


def explain(
    layers: Sequence[ProbedLayer],
    positions: torch.Tensor,
    candidates: Iterable[Frequencies],
    dtype: torch.dtype,
) -> Explained:
    """Find the one rotation that explains all keys, from each probe position to each next one.

    Args:
        layers: rows of every layer of the KV pool.
        positions: int64 ``[positions]``, ascending.
        candidates: frequencies that the model has tables of.
        dtype: coarsest dtype that keys went through.

    Raises:
        UnsupportedRotaryError: no rotation explains them, or more than one.
    """
    tolerance = TOLERANCE.get(dtype)
    if tolerance is None:
        raise UnsupportedRotaryError(f"keys in {str(dtype).removeprefix('torch.')}")
    distinct = {each.key: each for each in candidates}
    if not distinct:
        raise UnsupportedRotaryError("layers without a rotary embedding")
    for layer in layers:
        _check_layer(layer, tolerance)
    found = [_fits(layer.keys, positions, distinct, tolerance) for layer in layers]
    if not all(found):
        raise UnsupportedRotaryError("no one rotation explains how the keys turn")
    common = set.intersection(*found)
    if not common:
        raise UnsupportedRotaryError("the layers' rotary embeddings differ")
    if len(common) > 1:
        raise UnsupportedRotaryError("more than one rotation explains how the keys turn")
    ((key, pairing, start),) = common
    return Explained(distinct[key], Rotary(distinct[key].inv_freq, pairing), start)


def _check_layer(layer: ProbedLayer, tolerance: float) -> None:
    parts = [layer.keys] if layer.values is None else [layer.keys, layer.values]
    if any(not bool(part.isfinite().all()) or not bool(part.any()) for part in parts):
        raise UnsupportedRotaryError("keys or values that are zero, or no numbers")
    if layer.values is not None and _error(layer.values[:, 1:], layer.values[:, :1]) > tolerance:
        raise UnsupportedRotaryError("values that depend on the position")
    if _error(layer.keys[:, 1:], layer.keys[:, :1]) <= tolerance:
        raise UnsupportedRotaryError("layers whose keys don't turn with the position (NoPE)")


Fit = tuple[tuple[bytes, float], Pairing, int]
"""Key of the frequencies, pairing, and first dimension that turns."""


def _fits(
    keys: torch.Tensor,
    positions: torch.Tensor,
    candidates: dict[tuple[bytes, float], Frequencies],
    tolerance: float,
) -> set[Fit]:
    """Return all rotations that explain the keys of one layer."""
    width = int(keys.shape[-1])
    fits: set[Fit] = set()
    for key, pairing in product(candidates, Pairing):
        rotary = Rotary(candidates[key].inv_freq, pairing)
        starts = {0, width - rotary.dim} if rotary.dim <= width else set[int]()
        fits |= {
            (key, pairing, start)
            for start in starts
            if _explains(rotary, start, keys, positions, tolerance)
        }
    return fits


def _explains(
    rotary: Rotary, start: int, keys: torch.Tensor, positions: torch.Tensor, tolerance: float
) -> bool:
    """Return True if turning the keys of each position gives those of the next one, and back.

    The last pair goes from the last position to the first.
    """
    order = [*range(len(positions)), 0]
    return all(
        _error(_turned(rotary, start, keys[:, i], positions[i], positions[j]), keys[:, j])
        <= tolerance
        for i, j in [*pairwise(order), *pairwise(reversed(order))]
    )


def _turned(
    rotary: Rotary, start: int, keys: torch.Tensor, here: torch.Tensor, there: torch.Tensor
) -> torch.Tensor:
    """Return keys ``[tokens, heads, dim]`` turned from one position to another."""
    band = slice(start, start + rotary.dim)
    turned = keys.clone()
    count = len(keys)
    turned[..., band] = rotary.rotate(keys[..., band], here.expand(count), there.expand(count))
    return turned


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest of the tokens' errors, as a share of what is wanted."""
    size = wanted.square().flatten(1).mean(1).sqrt()
    off = (found - wanted).square().flatten(1).mean(1).sqrt()
    return float((off / size).max())
