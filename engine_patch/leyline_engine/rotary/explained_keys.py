"""The explanation of a model's cached keys by rotations.

One token alone in its sequence attends to itself, so nothing that its layers compute depends on
its position, except by the rotary embedding. Its cached rows at several positions must therefore
differ by a rotation of one band of the key, the same band in every layer, and by nothing else. The
layers' frequencies may differ, and some layers may not turn at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise, product

import torch

from leyline_engine.contract import RotaryFacts
from leyline_engine.rotary.rotation import (
    LayeredRotary,
    ModelRotary,
    Pairing,
    Rotary,
)

TOLERANCE = {
    torch.float32: 1e-4,
    torch.float16: 3e-3,
    torch.bfloat16: 2e-2,
    torch.float8_e4m3fn: 1e-1,
}
"""Tolerance of a turned key by the coarsest dtype that it went through: the root of the mean
square error, as a share of the key's. An e4m3 key is off by 3.7 %, and so is the one it is turned
from."""


class UnsupportedRotaryError(Exception):
    """Keys can't be moved by the model's form of rotary embedding."""


@dataclass(frozen=True, slots=True, eq=False)
class Frequencies:
    """The frequencies of one rotary embedding of a model."""

    inv_freq: torch.Tensor
    """fp32 ``[d/2]`` on the CPU."""
    scaling: float
    """Factor on cosines and sines (YaRN's mscale); it is in the keys already."""
    kind: str
    """Kind of rotary embedding, for display."""

    @property
    def key(self) -> tuple[bytes, float]:
        """The content by which two are the same."""
        return self.inv_freq.numpy().tobytes(), round(self.scaling, 6)


@dataclass(frozen=True, slots=True)
class ProbedLayer:
    """The cached rows of a few tokens, each at every probe position, in one layer."""

    keys: torch.Tensor
    """fp32 ``[tokens, positions, heads, dim]``."""
    values: torch.Tensor | None
    """The same of values; None if a key's row holds everything (MLA)."""


@dataclass(frozen=True, slots=True)
class Explained:
    """The rotations that explain the keys of every layer."""

    frequencies: tuple[Frequencies, ...]
    """Those in use."""
    rotary: ModelRotary
    """On the CPU."""
    start: int
    """First of the key's dimensions that turn."""

    @property
    def facts(self) -> RotaryFacts:
        """The same for the capability document."""
        kinds = sorted({each.kind for each in self.frequencies})
        if not kinds or len(self.rotary.distinct) > len(self.frequencies):
            kinds.append("none")
        return RotaryFacts(
            rope_type="+".join(kinds),
            pairing=str(self.rotary.pairing),
            rotary_dim=self.rotary.dim,
            inv_freq_digest=_digest(self.rotary),
            attention_scaling=max((each.scaling for each in self.frequencies), default=1.0),
        )


def explain(
    layers: Sequence[ProbedLayer],
    positions: torch.Tensor,
    candidates: Iterable[Frequencies],
    dtype: torch.dtype,
    *,
    unturned: bool = False,
) -> Explained:
    """Find the rotation that explains each layer's keys, from each probe position to the next.

    Args:
        layers: rows of every layer of the KV pool.
        positions: int64 ``[positions]``, ascending.
        candidates: frequencies that the model has.
        dtype: coarsest dtype that keys went through.
        unturned: True accepts a model of which no layer turns: its rows must be the same, bit for
            bit, at all positions.

    Raises:
        UnsupportedRotaryError: no rotation explains a layer's keys, or more than one does, or the
            layers turn different bands.
    """
    tolerance = TOLERANCE.get(dtype)
    if tolerance is None:
        raise UnsupportedRotaryError(f"keys in {str(dtype).removeprefix('torch.')}")
    distinct = {each.key: each for each in candidates}
    if not distinct and not unturned:
        raise UnsupportedRotaryError("layers without a rotary embedding")
    for layer in layers:
        _check_layer(layer, tolerance)
    if unturned and all(
        torch.equal(each.keys, each.keys[:, :1].expand_as(each.keys)) for each in layers
    ):
        return Explained((), Rotary.still(0, Pairing.HALF_SPLIT), 0)
    fits = [
        None
        if _stands_still(layer.keys, tolerance)
        else _fits(layer.keys, positions, distinct, tolerance)
        for layer in layers
    ]
    return _joined(_chosen(fits), distinct)


def stand_still(layers: Sequence[ProbedLayer], dtype: torch.dtype) -> bool:
    """Return True if no key of some layers depends on the position (NoPE).

    Args:
        dtype: coarsest dtype that keys went through.

    Raises:
        UnsupportedRotaryError: keys or values are no numbers, or values depend on the position.
    """
    tolerance = TOLERANCE.get(dtype)
    if tolerance is None or not layers:
        return False
    for layer in layers:
        _check_layer(layer, tolerance)
    return all(_stands_still(layer.keys, tolerance) for layer in layers)


def _check_layer(layer: ProbedLayer, tolerance: float) -> None:
    parts = [layer.keys] if layer.values is None else [layer.keys, layer.values]
    if any(not bool(part.isfinite().all()) or not bool(part.any()) for part in parts):
        raise UnsupportedRotaryError("keys or values that are zero, or no numbers")
    if layer.values is not None and _error(layer.values[:, 1:], layer.values[:, :1]) > tolerance:
        raise UnsupportedRotaryError("values that depend on the position")


def _stands_still(keys: torch.Tensor, tolerance: float) -> bool:
    """Return True if no dimension of a layer's keys depends on the position (NoPE).

    One dimension after the other: a narrow band would be lost in the error of the whole key.
    """
    off = (keys - keys[:, :1]).square().mean(dim=(0, 1, 2)).sqrt()
    return bool((off <= tolerance * keys.square().mean(dim=(0, 1, 2)).sqrt()).all())


Fit = tuple[tuple[bytes, float], Pairing, int]
"""Key of the frequencies, pairing, and first dimension that turns."""


def _chosen(found: Sequence[set[Fit] | None]) -> list[Fit | None]:
    """Return the one fit of every layer; None for those that don't turn."""
    turning = [fits for fits in found if fits is not None]
    if not turning:
        raise UnsupportedRotaryError("layers whose keys don't turn with the position (NoPE)")
    if not all(turning):
        raise UnsupportedRotaryError("no one rotation explains how a layer's keys turn")
    # Where one rotation explains all, another that explains some of them as well is chance.
    common = set.intersection(*turning)
    choices = [None if fits is None else common or fits for fits in found]
    if any(fits is not None and len(fits) > 1 for fits in choices):
        raise UnsupportedRotaryError("more than one rotation explains how the keys turn")
    return [None if fits is None else next(iter(fits)) for fits in choices]


def _joined(
    chosen: Sequence[Fit | None], candidates: Mapping[tuple[bytes, float], Frequencies]
) -> Explained:
    """Return the layers' rotations as one, if they turn the same band."""
    turning = [fit for fit in chosen if fit is not None]
    used = {key: candidates[key] for key, _, _ in turning}
    bands = {(pairing, start, candidates[key].inv_freq.numel()) for key, pairing, start in turning}
    if len(bands) > 1:
        raise UnsupportedRotaryError("layers that turn different parts of their keys")
    ((pairing, start, half),) = bands
    rotaries: dict[tuple[bytes, float] | None, Rotary] = {
        key: Rotary(each.inv_freq, pairing) for key, each in used.items()
    }
    if len(turning) < len(chosen):
        rotaries[None] = Rotary.still(2 * half, pairing)
    frequencies = tuple(used.values())
    if len(rotaries) == 1:
        return Explained(frequencies, next(iter(rotaries.values())), start)
    places = {key: place for place, key in enumerate(rotaries)}
    of_layer = tuple(places[None if fit is None else fit[0]] for fit in chosen)
    return Explained(frequencies, LayeredRotary(tuple(rotaries.values()), of_layer), start)


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


def _digest(rotary: ModelRotary) -> str:
    """Return a digest of all layers' frequencies, 16 hex digits."""
    state = blake2b(digest_size=8)
    for each in rotary.distinct:
        state.update(each.inv_freq.numpy().tobytes())
    if isinstance(rotary, LayeredRotary):
        state.update(bytes(rotary.of_layer))
    return state.hexdigest()
