"""The rotation of rotary keys to new positions (Leyline paper, section 3.2, equation 1).

A key computed at position p and needed at q is multiplied by R(q − p). The angles are the
model's own: fp32 products of position and inverse frequency, whose difference is then taken in
fp64, so that the result is what the model's rotary module would have produced at q.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

import torch


class Pairing(StrEnum):
    """The pairing of a cached key's dimensions for rotation."""

    INTERLEAVED = "interleaved"
    """(2i, 2i+1), the order of DeepSeek-V2 keys in the cache."""
    HALF_SPLIT = "half_split"
    """(i, i+d/2), as in Llama, Qwen3 and transformers' DeepSeek-V3."""


@dataclass(frozen=True, slots=True)
class Rotary:
    """The part of a model's rotary embedding that moves keys."""

    inv_freq: torch.Tensor
    """fp32 ``[d/2]`` from the model's rotary module (any scaling folded in)."""
    pairing: Pairing

    @classmethod
    def still(cls, dim: int, pairing: Pairing) -> Rotary:
        """Return the rotation by nothing, of layers without a rotary embedding (NoPE)."""
        return cls(torch.zeros(dim // 2), pairing)

    @property
    def dim(self) -> int:
        return 2 * int(self.inv_freq.numel())

    @property
    def distinct(self) -> tuple[Rotary, ...]:
        """The rotations of a model whose layers turn alike: this one."""
        return (self,)

    def index(self, layer: int) -> int:
        """Return the place in :attr:`distinct` of a layer's rotation."""
        return 0

    def at(self, layer: int) -> Rotary:
        """Return the rotation of a layer."""
        return self

    def to(self, device: torch.device) -> Rotary:
        """Return the same rotation on a device."""
        return replace(self, inv_freq=self.inv_freq.to(device))

    def angles(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the angles of int64 ``positions [T]``: fp64 ``[T, d/2]`` holding fp32 products."""
        products = positions.to(torch.float32)[:, None] * self.inv_freq[None, :]
        return products.to(torch.float64)

    def rotate(
        self, keys: torch.Tensor, computed_at: torch.Tensor, needed_at: torch.Tensor
    ) -> torch.Tensor:
        """Move keys from the positions they were computed at to others.

        Args:
            keys: ``[T, heads, d]`` in any float dtype; computed in fp32.
            computed_at: int64 ``[T]``.
            needed_at: int64 ``[T]``.

        Returns:
            ``[T, heads, d]`` in the dtype of ``keys``. Attention scaling (YaRN mscale) is in the
            keys already and isn't changed.
        """
        return self.apply(keys, *self.spread(*self.turns(computed_at, needed_at)))

    def turns(
        self, computed_at: torch.Tensor, needed_at: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin of the angles between int64 positions ``[T]``: fp32 ``[T, d/2]``."""
        delta = self.angles(needed_at) - self.angles(computed_at)
        return delta.cos().to(torch.float32), delta.sin().to(torch.float32)

    def spread(self, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``[T, d/2]`` of :meth:`turns` as factors of a key and of its swapped pairs.

        Returns:
            fp32 ``[T, 1, d]`` each, in the order of the key's dimensions.
        """
        return self._join(cos, cos)[:, None, :], self._join(-sin, sin)[:, None, :]

    def apply(self, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate ``keys [T, heads, d]`` by ``cos`` and ``sin`` of :meth:`spread`; same dtype."""
        first, second = self._split(keys)
        swapped = self._join(second, first).to(torch.float32).mul_(sin)
        return keys.to(torch.float32).mul(cos).add_(swapped).to(keys.dtype)

    def _split(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.pairing is Pairing.INTERLEAVED:
            return keys[..., 0::2], keys[..., 1::2]
        half = keys.shape[-1] // 2
        return keys[..., :half], keys[..., half:]

    def _join(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        if self.pairing is not Pairing.INTERLEAVED:
            return torch.cat((first, second), dim=-1)
        if first.dtype is torch.float32:
            # The same numbers in the same order, five times as fast as stacking them on a CPU.
            return torch.view_as_real(torch.complex(first, second)).flatten(-2)
        return torch.stack((first, second), dim=-1).flatten(-2)


@dataclass(frozen=True, slots=True)
class LayeredRotary:
    """The rotations of a model whose layers turn the same band by different frequencies.

    OLMo 3 has YaRN in some layers only, and some layers of Command-A don't turn at all.
    """

    distinct: tuple[Rotary, ...]
    """Different rotations of the same width and pairing."""
    of_layer: tuple[int, ...]
    """By layer, the place of its rotation in ``distinct``."""

    @property
    def dim(self) -> int:
        return self.distinct[0].dim

    @property
    def pairing(self) -> Pairing:
        return self.distinct[0].pairing

    def index(self, layer: int) -> int:
        """Return the place in :attr:`distinct` of a layer's rotation."""
        return self.of_layer[layer]

    def at(self, layer: int) -> Rotary:
        """Return the rotation of a layer."""
        return self.distinct[self.of_layer[layer]]

    def to(self, device: torch.device) -> LayeredRotary:
        """Return the same rotations on a device."""
        return replace(self, distinct=tuple(rotary.to(device) for rotary in self.distinct))


ModelRotary = Rotary | LayeredRotary
"""The rotations of all layers of a model."""
