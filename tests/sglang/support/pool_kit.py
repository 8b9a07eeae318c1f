"""SGLang's own KV pools with random contents, and what a splice of them must give, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

from leyline_engine.rotary.rotation import LayeredRotary, Pairing, Rotary
from leyline_engine.rows.mover import PoolTensors
from leyline_engine.sglang.rows.layouts import read_pool

SLOTS = 96
LAYERS = 3
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FP8 = torch.float8_e4m3fn
# Half a unit in the last place, and a little for the arithmetic in fp32.
ROUNDING = {torch.float32: 2**-21, torch.bfloat16: 1.01 * 2**-8, torch.float16: 1.01 * 2**-11}


@dataclass(frozen=True)
class Shape:
    """A kind of pool; ``name`` is the test's id."""

    name: str
    pairing: Pairing
    rotary_dim: int
    heads: int = 2
    key_dim: int = 32
    value_dim: int = 32
    mla: bool = False


SHAPES = (
    Shape("mla-interleaved", Pairing.INTERLEAVED, 16, mla=True),
    Shape("mla-half-split", Pairing.HALF_SPLIT, 16, mla=True),
    Shape("gqa-half-split", Pairing.HALF_SPLIT, 32),
    Shape("gqa-partial", Pairing.HALF_SPLIT, 12, heads=3, value_dim=20),
    Shape("gqa-partial-interleaved", Pairing.INTERLEAVED, 20, key_dim=48),
)


def rotary_of(shape: Shape, base: float = 10000.0) -> Rotary:
    """Frequencies as models have them."""
    width = shape.rotary_dim
    inv_freq = 1.0 / base ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    return Rotary(inv_freq, shape.pairing)


def layered_of(shape: Shape) -> LayeredRotary:
    """Rotations of three layers: two with frequencies of their own, and one that doesn't turn."""
    still = Rotary.still(shape.rotary_dim, shape.pairing)
    return LayeredRotary((rotary_of(shape), rotary_of(shape, 500_000.0), still), (1, 0, 2))


def banded(pool: MLATokenToKVPool | MHATokenToKVPool, shape: Shape) -> PoolTensors:
    """A pool's tensors with the band that turns: after the latent, or at a key's beginning."""
    tensors = read_pool(pool)
    start = int(tensors.keys[0].shape[-1]) - shape.rotary_dim if shape.mla else 0
    return tensors.turning(start, shape.rotary_dim)


def sglang_pool(shape: Shape, dtype: torch.dtype) -> MLATokenToKVPool | MHATokenToKVPool:
    """An empty pool of SGLang's."""
    if shape.mla:
        return MLATokenToKVPool(SLOTS, 1, dtype, 40, shape.rotary_dim, LAYERS, "cpu", False)
    return MHATokenToKVPool(
        SLOTS,
        1,
        dtype,
        shape.heads,
        shape.key_dim,
        LAYERS,
        "cpu",
        False,
        v_head_dim=shape.value_dim,
    )


def random_pool(
    shape: Shape, dtype: torch.dtype, generator: torch.Generator, spread: float = 1.0
) -> PoolTensors:
    """A pool of SGLang's with every slot filled."""
    tensors = banded(sglang_pool(shape, dtype), shape)
    for tensor in (*tensors.keys, *tensors.values):
        tensor.copy_(tensors.encode(spread * torch.randn(tensor.shape, generator=generator)))
    return tensors


def snapshot(tensors: PoolTensors) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Copies of all keys and all values."""
    return [t.clone() for t in tensors.keys], [t.clone() for t in tensors.values]


def turned(
    keys: torch.Tensor, rotary: Rotary, computed_at: torch.Tensor, needed_at: torch.Tensor
) -> torch.Tensor:
    """``keys [T, heads, d]`` turned in float64, pair by pair, as complex numbers.

    Bytes are e4m3 numbers, and decoded.
    """
    first, second = _pairs(rotary, keys.shape[-1])
    angles = rotary.angles(needed_at) - rotary.angles(computed_at)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None, :]
    wide = numbers(keys)
    product = torch.complex(wide[..., first], wide[..., second]) * turn
    result = torch.empty_like(wide)
    result[..., first], result[..., second] = product.real, product.imag
    return result


def _pairs(rotary: Rotary, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    pair = torch.arange(width // 2)
    if rotary.pairing is Pairing.INTERLEAVED:
        return 2 * pair, 2 * pair + 1
    return pair, pair + width // 2


def error(got: torch.Tensor, wanted: torch.Tensor, rotary: Rotary) -> float:
    """Largest distance of a rotated pair from where it should be, as a share of its length."""
    first, second = _pairs(rotary, wanted.shape[-1])
    off = got.double() - wanted
    distance = torch.hypot(off[..., first], off[..., second])
    length = torch.hypot(wanted[..., first], wanted[..., second])
    return float((distance / length).max())


def numbers(stored: torch.Tensor) -> torch.Tensor:
    """Stored elements in float64; bytes are e4m3 numbers, decoded by their definition."""
    if stored.dtype != torch.uint8:
        return stored.double()
    exponent, digits = (stored >> 3 & 15).double(), (stored & 7).double()
    normal = torch.exp2(exponent - 7) * (1 + digits / 8)
    size = torch.where(exponent == 0, digits * 2.0**-9, normal)
    size = torch.where(stored & 127 == 127, torch.nan, size)
    return torch.where(stored >= 128, -size, size)


def roundings(got: torch.Tensor, wanted: torch.Tensor, *, terms: float = 0.0) -> float:
    """Largest distance of stored e4m3 bytes from float64 numbers, clamped at ±448, as a multiple
    of the most that rounding to nearest can be off: half a step where the number is.

    Args:
        terms: largest term of a sum in fp32 that the numbers are. Large terms may cancel to a
            small number; what rounding them adds isn't counted.
    """
    clamped = wanted.clamp(-448, 448)
    half = torch.exp2(clamped.abs().clamp(min=2.0**-6).log2().floor() - 4)
    distance = (numbers(got) - clamped).abs() - 4 * terms * 2.0**-24
    return float((distance / half).max())
