"""A thousand chained splices: the error stays that of one, and naive chaining drifts.

Every splice goes through the pool's own copy. The truth is the as-computed key turned in fp64 to
where it is needed.

The bound. A component of a turned pair is ``a·cos − b·sin``. With u = 2⁻²⁴, rounding cosine and
sine to fp32, the two products and their difference cost at most u·(|a·cos| + |b·sin|) twice and
u·|result| once, so at most 3u of the pair's length; storing rounds once more, to the pool's dtype.
Nothing in it depends on how many splices came before, which is what is claimed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from leyline_engine.rotary.rotation import Pairing, Rotary
from leyline_replay.cache.pool import KVLayout, KVPool
from leyline_replay.cache.slots import Slots

CHAIN = 1000
TOKENS = 8
COMPUTED_AT = 700
DIM = 16
INV_FREQ = 1.0 / 10000.0 ** (torch.arange(0, DIM, 2, dtype=torch.float32) / DIM)
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Largest relative error of one rounding."""


def make_pool(kind: str, dtype: torch.dtype) -> KVPool:
    """GQA with half-split pairs in half of each key, or MLA with interleaved pairs in k_pe."""
    if kind == "gqa":
        layout = KVLayout("gqa", (((2, 2 * DIM), (2, 24)),) * 2, 0, DIM, DIM, dtype)
        return KVPool(layout, 64, Rotary(INV_FREQ, Pairing.HALF_SPLIT), torch.device("cpu"))
    layout = KVLayout("mla_latent", (((1, 32), (1, DIM)),) * 2, 1, 0, DIM, dtype)
    return KVPool(layout, 64, Rotary(INV_FREQ, Pairing.INTERLEAVED), torch.device("cpu"))


@dataclass(frozen=True, slots=True)
class Chain:
    """Tokens that are copied on and on, from one set of slots to another and back."""

    pool: KVPool
    origin: Slots
    naive: bool
    """Take what the last splice left for a freshly computed key, as an engine would that keeps
    none of the original."""

    def splice(self, step: int, source: Slots, start: int) -> Slots:
        """Copy ``source`` to positions ``start…``; the slots that hold the copy."""
        target = np.arange(TOKENS, 2 * TOKENS) + (step % 2) * TOKENS
        self.pool.copy(source, target, start)
        if self.naive:
            layers = [self.pool.read(layer, target) for layer in range(self.pool.layout.layers)]
            self.pool.write(target, start, layers)
        return target

    def errors(self, places: list[int]) -> list[float]:
        """The error after each splice of a chain that visits ``places``."""
        slots = self.origin
        found = []
        for step, start in enumerate(places):
            slots = self.splice(step, slots, start)
            found.append(self.error(slots, start))
        return found

    def error(self, slots: Slots, start: int) -> float:
        """Largest distance from the truth, each as a share of its pair's length."""
        worst = 0.0
        for layer in range(self.pool.layout.layers):
            first, second = pairs(self.pool, layer, self.origin)
            truth = turned(first, second, COMPUTED_AT, start)
            got = torch.complex(*pairs(self.pool, layer, slots))
            apart = torch.view_as_real(got - truth).abs().amax(-1)
            worst = max(worst, float((apart / truth.abs()).max()))
        return worst


def begin(kind: str, dtype: torch.dtype, *, naive: bool = False) -> Chain:
    """Random KV, computed at one place."""
    pool = make_pool(kind, dtype)
    generator = torch.Generator().manual_seed(1)
    layers = [
        (
            torch.randn(TOKENS, *pool.layout.shapes[0][0], generator=generator).to(dtype),
            torch.randn(TOKENS, *pool.layout.shapes[0][1], generator=generator).to(dtype),
        )
        for _ in range(pool.layout.layers)
    ]
    origin = np.arange(TOKENS, dtype=np.int64)
    pool.write(origin, COMPUTED_AT, layers)
    return Chain(pool, origin, naive)


def pairs(pool: KVPool, layer: int, slots: Slots) -> tuple[torch.Tensor, torch.Tensor]:
    """The rotated pairs of stored keys, fp64 ``[T, heads, d/2]`` each."""
    layout = pool.layout
    start = layout.rotary_start
    band = pool.read(layer, slots)[layout.rotary_tensor][..., start : start + DIM].double()
    if pool.rotary.pairing is Pairing.INTERLEAVED:
        return band[..., 0::2].contiguous(), band[..., 1::2].contiguous()
    return band[..., : DIM // 2].contiguous(), band[..., DIM // 2 :].contiguous()


def turned(
    first: torch.Tensor, second: torch.Tensor, computed_at: int, needed_at: int
) -> torch.Tensor:
    """Pairs as complex numbers, turned in fp64 by the model's own fp32 angles."""
    rows = torch.arange(TOKENS, dtype=torch.float32)[:, None]
    to, away = ((rows + place) * INV_FREQ for place in (needed_at, computed_at))
    angles = (to.double() - away.double())[:, None, :]
    return torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)


def places() -> list[int]:
    """The place where each splice of a chain puts its tokens."""
    return np.random.default_rng(3).integers(32, 4000, CHAIN).tolist()


def bound(dtype: torch.dtype) -> float:
    """The error of one splice at most, as a share of a pair's length; see the module."""
    stored = 0.0 if dtype is torch.float32 else UNIT[dtype]
    return 3 * UNIT[torch.float32] + stored


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_a_thousand_chained_splices_are_as_exact_as_one(kind: str, dtype: torch.dtype) -> None:
    """The bound of a single splice holds after every one of them."""
    errors = begin(kind, dtype).errors(places())
    assert len(errors) == CHAIN
    assert max(errors) <= bound(dtype)
    assert max(errors[-100:]) <= 1.25 * max(errors[:100])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_naive_chaining_drifts(kind: str, dtype: torch.dtype) -> None:
    """Control: turning the rounded key again passes the bound by far, and the error keeps
    growing."""
    errors = begin(kind, dtype, naive=True).errors(places())
    assert errors[0] <= bound(dtype)
    assert max(errors[-100:]) > 5 * bound(dtype)
    assert max(errors[-100:]) > 2 * max(errors[:100])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_a_chain_ends_in_the_bits_of_one_splice(kind: str, dtype: torch.dtype) -> None:
    """A key that took any way is the one that a single splice to that place gives."""
    chain = begin(kind, dtype)
    slots = chain.origin
    for step, start in enumerate(places()):
        slots = chain.splice(step, slots, start)
    direct = np.arange(4 * TOKENS, 5 * TOKENS)
    chain.pool.copy(chain.origin, direct, places()[-1])
    for layer in range(chain.pool.layout.layers):
        for got, expected in zip(
            chain.pool.read(layer, slots), chain.pool.read(layer, direct), strict=True
        ):
            assert torch.equal(got, expected)
