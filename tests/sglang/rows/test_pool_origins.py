"""Keys as computed, beside the pool: rounding stays flat, and stale entries are never believed."""

from __future__ import annotations

import pytest
import torch
from pool_kit import (
    LAYERS,
    ROUNDING,
    SHAPES,
    SLOTS,
    Shape,
    error,
    random_pool,
    rotary_of,
    turned,
)

from leyline_engine.rows.mover import PoolTensors
from leyline_engine.rows.pool import SplicePool

COUNT = 10
START = 5000
MLA, GQA = SHAPES[0], SHAPES[2]
FLAT = ROUNDING[torch.bfloat16]


@pytest.fixture
def generator() -> torch.Generator:
    """A new seed in each run, shown where a test fails."""
    generator = torch.Generator()
    print(f"seed {generator.seed()}")
    return generator


class Chain:
    """The same tokens spliced again and again, each time from where the last splice left them."""

    def __init__(self, shape: Shape, generator: torch.Generator, origins: int | None) -> None:
        self.generator = generator
        self.tensors = random_pool(shape, torch.bfloat16, generator)
        self.rotary = rotary_of(shape)
        self.pool = SplicePool(self.tensors, self.rotary, origins=origins)
        self.slots = torch.arange(1, COUNT + 1)
        self.position = START
        self.original = [self.tensors.band(keys[self.slots]) for keys in self.tensors.keys]

    def step(self, pool: SplicePool | None = None) -> None:
        """Splice to free slots, up to 200 positions away; by another pool if given."""
        free = torch.ones(SLOTS + 1, dtype=torch.bool)
        free[0] = False
        free[self.slots] = False
        order = torch.nonzero(free).flatten()
        chosen = order[torch.randperm(len(order), generator=self.generator)[:COUNT]]
        shift = int(torch.randint(1, 200, (), generator=self.generator))
        sign = 1 if self.position < START else -1
        dest = self.position + sign * shift
        (pool or self.pool).splice(self.slots, chosen, self.position, dest)
        self.slots, self.position = chosen, dest

    def error(self) -> float:
        """Against the as-computed keys turned once, in float64."""
        there = torch.arange(COUNT) + self.position
        home = torch.arange(COUNT) + START
        return max(
            error(
                self.tensors.band(keys[self.slots]),
                turned(original, self.rotary, home, there),
                self.rotary,
            )
            for keys, original in zip(self.tensors.keys, self.original, strict=True)
        )


@pytest.mark.parametrize("shape", [MLA, GQA], ids=lambda shape: shape.name)
def test_a_thousand_splices_round_like_one(shape: Shape, generator: torch.Generator) -> None:
    """In bf16 the error after 1,000 chained splices is that of a single rounding."""
    chain = Chain(shape, generator, origins=None)
    for step in range(1000):
        chain.step()
        if step % 50 == 0:
            assert chain.error() <= FLAT
    assert chain.error() <= FLAT


@pytest.mark.parametrize("shape", [MLA, GQA], ids=lambda shape: shape.name)
def test_without_origins_rounding_piles_up(shape: Shape, generator: torch.Generator) -> None:
    """Control: the same chain by pools that remember nothing drifts far away."""
    chain = Chain(shape, generator, origins=None)
    for _ in range(1000):
        chain.step(SplicePool(chain.tensors, chain.rotary))
    assert chain.error() > 10 * FLAT


def overwrite(tensors: PoolTensors, slots: torch.Tensor, generator: torch.Generator) -> None:
    """Put other KV in the same slots without notice, as a prefill of the engine's does."""
    for tensor in (*tensors.keys, *tensors.values):
        tensor[slots] = torch.randn((len(slots), *tensor.shape[1:]), generator=generator).to(
            tensor.dtype
        )


@pytest.mark.parametrize("shape", [MLA, GQA], ids=lambda shape: shape.name)
def test_a_slot_that_was_prefilled_again_is_not_taken_for_a_spliced_one(
    shape: Shape, generator: torch.Generator
) -> None:
    """A fresh row in a slot that held a spliced one is turned from the fresh key."""
    chain = Chain(shape, generator, origins=None)
    chain.step()
    overwrite(chain.tensors, chain.slots, generator)
    fresh = [chain.tensors.band(keys[chain.slots]) for keys in chain.tensors.keys]
    here = torch.arange(COUNT) + chain.position
    chain.step()
    there = torch.arange(COUNT) + chain.position
    for keys, key in zip(chain.tensors.keys, fresh, strict=True):
        wanted = turned(key, chain.rotary, here, there)
        assert error(chain.tensors.band(keys[chain.slots]), wanted, chain.rotary) <= FLAT
    assert chain.error() > 10 * FLAT  # the old tokens are nowhere


@pytest.mark.parametrize("layer", range(LAYERS))
def test_one_layer_that_differs_is_enough(layer: int, generator: torch.Generator) -> None:
    """An entry that fits all layers but one is not believed in any."""
    chain = Chain(MLA, generator, origins=None)
    chain.step()
    chain.tensors.band(chain.tensors.keys[layer])[chain.slots, 0, 3] += 1
    fresh = [chain.tensors.band(keys[chain.slots]) for keys in chain.tensors.keys]
    here = torch.arange(COUNT) + chain.position
    chain.step()
    there = torch.arange(COUNT) + chain.position
    for keys, key in zip(chain.tensors.keys, fresh, strict=True):
        wanted = chain.rotary.rotate(key, here, there)
        assert torch.equal(chain.tensors.band(keys[chain.slots]), wanted)


def test_a_row_spliced_from_elsewhere_is_no_witness(generator: torch.Generator) -> None:
    """An entry counts only at its row's position."""
    chain = Chain(MLA, generator, origins=None)
    chain.step()
    fresh = [chain.tensors.band(keys[chain.slots]) for keys in chain.tensors.keys]
    chain.position += 1  # the caller says that the rows are elsewhere: they do as they are
    here = torch.arange(COUNT) + chain.position
    chain.step()
    there = torch.arange(COUNT) + chain.position
    for keys, key in zip(chain.tensors.keys, fresh, strict=True):
        wanted = chain.rotary.rotate(key, here, there)
        assert torch.equal(chain.tensors.band(keys[chain.slots]), wanted)


def test_a_full_ring_falls_back_to_the_row_as_it_is(generator: torch.Generator) -> None:
    """Rows whose as-computed key gave way are turned from what they hold, rounding once more."""
    shape = MLA
    tensors, rotary = random_pool(shape, torch.bfloat16, generator), rotary_of(shape)
    pool = SplicePool(tensors, rotary, origins=COUNT)
    first, second = torch.arange(1, COUNT + 1), torch.arange(COUNT + 1, 2 * COUNT + 1)
    third, fourth = second + COUNT, second + 2 * COUNT
    pool.splice(first, third, 300, 200)
    held = [tensors.band(keys[third]) for keys in tensors.keys]
    pool.splice(second, fourth, 900, 850)  # takes the whole ring
    pool.splice(third, second, 200, 250)
    positions = torch.arange(COUNT)
    for keys, key in zip(tensors.keys, held, strict=True):
        wanted = rotary.rotate(key, positions + 200, positions + 250)
        assert torch.equal(tensors.band(keys[second]), wanted)


def test_more_rows_than_the_ring_has_are_spliced_all_the_same(generator: torch.Generator) -> None:
    """The first rows keep an origin, the others are turned right and keep none."""
    tensors, rotary = random_pool(MLA, torch.bfloat16, generator), rotary_of(MLA)
    pool = SplicePool(tensors, rotary, origins=4)
    slots = torch.arange(1, 31)
    original = [tensors.band(keys[slots[:10]]) for keys in tensors.keys]
    pool.splice(slots[:10], slots[10:20], 60, 50)
    once = [tensors.band(keys[slots[10:20]]) for keys in tensors.keys]
    pool.splice(slots[10:20], slots[20:], 50, 3000)
    positions = torch.arange(10)
    for layer, keys in enumerate(tensors.keys):
        from_origin = rotary.rotate(original[layer], positions + 60, positions + 3000)
        from_row = rotary.rotate(once[layer], positions + 50, positions + 3000)
        got = tensors.band(keys[slots[20:]])
        assert torch.equal(got[:4], from_origin[:4])
        assert torch.equal(got[4:], from_row[4:])


def test_a_ring_that_wraps_in_the_middle_of_a_splice_mixes_nothing_up(
    generator: torch.Generator,
) -> None:
    """Old and new rows in one splice: each is turned from its own key, whichever loses its
    origin."""
    tensors, rotary = random_pool(GQA, torch.float32, generator), rotary_of(GQA)
    pool = SplicePool(tensors, rotary, origins=12)
    slots = torch.arange(1, 61)
    pool.splice(slots[:10], slots[10:20], 500, 480)
    mixed = torch.cat((slots[10:20], slots[20:30]))  # ten with an origin, ten without
    standing = torch.arange(20) + 480
    keys = [tensors.band(layer[mixed]) for layer in tensors.keys]
    pool.splice(mixed, slots[30:50], 480, 7)
    for layer, key in zip(tensors.keys, keys, strict=True):
        wanted = turned(key, rotary, standing, torch.arange(20) + 7)
        # Two roundings at most: the row's own, and this splice's.
        assert error(tensors.band(layer[slots[30:50]]), wanted, rotary) <= 3 * 2**-22
    assert not torch.equal(keys[0][:10], keys[0][10:])


def test_a_copy_to_the_same_position_carries_the_origin(generator: torch.Generator) -> None:
    """After a plain copy a chain is as exact as before."""
    chain = Chain(MLA, generator, origins=None)
    for _ in range(50):
        chain.step()
        free = torch.ones(SLOTS + 1, dtype=torch.bool)
        free[0], free[chain.slots] = False, False
        chosen = torch.nonzero(free).flatten()[:COUNT]
        chain.pool.splice(chain.slots, chosen, chain.position, chain.position)
        chain.slots = chosen
    assert chain.error() <= FLAT


def test_tokens_that_come_home_have_the_key_they_were_computed_with(
    generator: torch.Generator,
) -> None:
    """A splice back to where a key was computed gives its bits back."""
    tensors, rotary = random_pool(MLA, torch.bfloat16, generator), rotary_of(MLA)
    pool = SplicePool(tensors, rotary)
    slots = torch.arange(1, 31)
    original = [tensors.band(keys[slots[:10]]) for keys in tensors.keys]
    pool.splice(slots[:10], slots[10:20], 77, 12345)
    pool.splice(slots[10:20], slots[20:], 12345, 77)
    for keys, key in zip(tensors.keys, original, strict=True):
        assert torch.equal(tensors.band(keys[slots[20:]]), key)


def test_erasing_drops_origins_that_no_row_vouches_for(generator: torch.Generator) -> None:
    """Keys of rows that the engine overwrote since leave the ring with the next erasure."""
    chain = Chain(MLA, generator, origins=None)
    chain.step()
    assert all(layer.any() for layer in chain.pool.as_computed)
    overwrite(chain.tensors, chain.slots, generator)
    chain.pool.erase(torch.tensor([SLOTS]))
    assert not any(layer.any() for layer in chain.pool.as_computed)


def test_two_pools_with_the_same_history_hold_the_same_bits() -> None:
    """Nothing depends on chance or a clock: ranks that do the same have the same."""
    pools = [Chain(GQA, torch.Generator().manual_seed(3), origins=COUNT + 3) for _ in range(2)]
    for chain in pools:
        for _ in range(20):
            chain.step()
    one, other = (chain.tensors.keys for chain in pools)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
