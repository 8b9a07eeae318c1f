"""Splicing FP8 rows: one rounding however often, and never a row whose as-computed key is gone."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

import pytest
import torch
from pool_kit import (
    FP8,
    LAYERS,
    SHAPES,
    SLOTS,
    Shape,
    banded,
    numbers,
    random_pool,
    rotary_of,
    roundings,
    sglang_pool,
    snapshot,
    turned,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

from leyline_engine.rotary.rotation import Pairing, Rotary
from leyline_engine.rows.mover import PoolTensors
from leyline_engine.rows.origins import (
    DEFAULT_ORIGIN_BYTES,
    OriginsError,
    bytes_per_origin,
    origin_bytes_from,
    origin_rows,
)
from leyline_engine.rows.pool import OriginGoneError, SplicePool
from leyline_engine.sglang.rows.layouts import UnsupportedPoolError, read_pool

MLA, GQA = SHAPES[0], SHAPES[2]
COUNT = 20
ONE = 1.0001
"""One rounding, and a little for the arithmetic in fp32."""
FRESH, SPLICED = "fresh", "spliced"


@pytest.fixture
def generator() -> torch.Generator:
    """A new seed in each run, shown where a test fails."""
    generator = torch.Generator()
    print(f"seed {generator.seed()}")
    return generator


def scattered(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Source and target slots in no order, disjoint."""
    order = torch.randperm(SLOTS, generator=generator) + 1
    return order[:COUNT], order[COUNT : 2 * COUNT]


def test_sglang_keeps_fp8_as_bytes_that_are_read_as_numbers(generator: torch.Generator) -> None:
    """Bytes that SGLang's own pool writes are decoded to the numbers that it rounded to."""
    pool = sglang_pool(GQA, FP8)
    keys = 100 * torch.randn(SLOTS, GQA.heads, GQA.key_dim, generator=generator)
    keys[0, 0, :3] = torch.tensor([500.0, -1e9, 2.0**-9])
    pool.set_kv_buffer(
        None, torch.arange(1, SLOTS + 1), keys.clone(), keys.clone(), layer_id_override=1
    )
    tensors = banded(pool, GQA)
    assert (tensors.dtype, tensors.stored) == (FP8, torch.uint8)
    written = tensors.keys[1][1:]
    assert roundings(written, keys.double()) <= 1
    assert torch.equal(tensors.decode(written).double(), numbers(written))
    assert torch.equal(tensors.encode(keys), written)


def test_bytes_are_decoded_and_encoded_one_to_one() -> None:
    """Each of the 256 bytes is the number of its definition, and is encoded as itself."""
    tensors = banded(sglang_pool(GQA, FP8), GQA)
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(tensors.encode(tensors.decode(every)), every)
    torch.testing.assert_close(
        tensors.decode(every).double(), numbers(every), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize(("start", "dest"), [(4000, 3300), (40, 60_000)])
def test_a_splice_turns_the_rotary_part_and_leaves_the_rest(
    shape: Shape, start: int, dest: int, generator: torch.Generator
) -> None:
    """Targets hold the turned keys, rounded once; all else of every slot keeps its bits."""
    tensors, rotary = random_pool(shape, FP8, generator), rotary_of(shape)
    source, target = scattered(generator)
    keys, values = snapshot(tensors)
    SplicePool(tensors, rotary).splice(source, target, start, dest)
    positions = torch.arange(COUNT)
    for layer in range(LAYERS):
        band = tensors.band(keys[layer][source])
        wanted = turned(band, rotary, positions + start, positions + dest)
        got = tensors.band(tensors.keys[layer][target])
        assert roundings(got, wanted) <= ONE
        keys[layer][target] = keys[layer][source]
        tensors.band(keys[layer])[target] = got
        assert torch.equal(tensors.keys[layer], keys[layer])
    for layer, old in enumerate(values):
        old[target] = old[source]
        assert torch.equal(tensors.values[layer], old)


def _off_by_one(rotary: Rotary) -> tuple[Rotary, int]:
    return rotary, 1


def _other_base(rotary: Rotary) -> tuple[Rotary, int]:
    return replace(rotary, inv_freq=rotary.inv_freq**1.1), 0


def _other_pairing(rotary: Rotary) -> tuple[Rotary, int]:
    return replace(rotary, pairing=next(p for p in Pairing if p is not rotary.pairing)), 0


def _not_at_all(rotary: Rotary) -> tuple[Rotary, int]:
    return rotary, 700


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("mistake", [_off_by_one, _other_base, _other_pairing, _not_at_all])
def test_the_reference_notices_a_wrong_turn(
    shape: Shape,
    mistake: Callable[[Rotary], tuple[Rotary, int]],
    generator: torch.Generator,
) -> None:
    """Control: each wrong way to turn is off by many roundings."""
    tensors, rotary = random_pool(shape, FP8, generator), rotary_of(shape)
    source, target = scattered(generator)
    positions = torch.arange(COUNT)
    band = tensors.band(tensors.keys[0][source])
    wanted = turned(band, rotary, positions + 4000, positions + 3300)
    wrong, shift = mistake(rotary)
    SplicePool(tensors, wrong).splice(source, target, 4000, 3300 + shift)
    assert roundings(tensors.band(tensors.keys[0][target]), wanted) > 10


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_what_a_turn_makes_too_large_is_clamped(shape: Shape, generator: torch.Generator) -> None:
    """Turned keys above 448 are 448, as SGLang writes them, and never NaN."""
    tensors, rotary = random_pool(shape, FP8, generator, spread=400.0), rotary_of(shape)
    source, target = scattered(generator)
    positions = torch.arange(COUNT)
    wanted = turned(tensors.band(tensors.keys[0][source]), rotary, positions + 500, positions + 200)
    assert (wanted.abs() > 480).any()
    SplicePool(tensors, rotary).splice(source, target, 500, 200)
    got = tensors.band(tensors.keys[0][target])
    assert roundings(got, wanted, terms=448.0) <= ONE
    assert (numbers(got).abs() == 448).any()


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_splice_to_the_same_position_is_a_copy(shape: Shape, generator: torch.Generator) -> None:
    """Rows that keep their position keep every bit, those of negative zeros and NaN as well."""
    tensors = random_pool(shape, FP8, generator)
    for tensor in (*tensors.keys, *tensors.values):
        drawn = torch.randint(256, tensor.shape, generator=generator, dtype=torch.uint8)
        tensor.copy_(drawn)
    source, target = scattered(generator)
    SplicePool(tensors, rotary_of(shape)).splice(source, target, 700, 700)
    for tensor in (*tensors.keys, *tensors.values):
        assert torch.equal(tensor[target], tensor[source])


class Chain:
    """The same tokens spliced again and again, each time from where the last splice left them."""

    def __init__(self, shape: Shape, generator: torch.Generator) -> None:
        self.generator = generator
        self.tensors, self.rotary = random_pool(shape, FP8, generator), rotary_of(shape)
        self.pool = SplicePool(self.tensors, self.rotary)
        self.slots, self.position = torch.arange(1, COUNT + 1), 5000
        self.original = [self.tensors.band(keys[self.slots]) for keys in self.tensors.keys]

    def step(self, pool: SplicePool | None = None) -> None:
        """Splice to free slots, up to 200 positions away; by another pool if given."""
        free = torch.ones(SLOTS + 1, dtype=torch.bool)
        free[0], free[self.slots] = False, False
        order = torch.nonzero(free).flatten()
        chosen = order[torch.randperm(len(order), generator=self.generator)[:COUNT]]
        shift = int(torch.randint(1, 200, (), generator=self.generator))
        dest = self.position + (shift if self.position < 5000 else -shift)
        (pool or self.pool).splice(self.slots, chosen, self.position, dest)
        self.pool.freed([self.slots])
        self.slots, self.position = chosen, dest

    def roundings(self) -> float:
        """Against the as-computed keys turned once, in float64."""
        home = torch.arange(COUNT) + 5000
        there = torch.arange(COUNT) + self.position
        return max(
            roundings(
                self.tensors.band(keys[self.slots]), turned(original, self.rotary, home, there)
            )
            for keys, original in zip(self.tensors.keys, self.original, strict=True)
        )


@pytest.mark.nightly
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_thousand_splices_round_like_one(shape: Shape, generator: torch.Generator) -> None:
    """After 1,000 chained splices, and at each look between, every key is off by one rounding."""
    chain = Chain(shape, generator)
    for step in range(1000):
        chain.step()
        if step % 50 == 0:
            assert chain.roundings() <= ONE
    assert chain.roundings() <= ONE


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_without_as_computed_keys_rounding_piles_up(
    shape: Shape, generator: torch.Generator
) -> None:
    """Control: the same chain by pools that remember nothing is soon far off."""
    chain = Chain(shape, generator)
    for _ in range(64):
        chain.step(SplicePool(chain.tensors, chain.rotary))
    assert chain.roundings() > 5


def test_a_row_whose_as_computed_key_gave_way_is_not_turned(generator: torch.Generator) -> None:
    """Its splice is refused before anything is written; copies to its own position go on."""
    tensors, rotary = random_pool(MLA, FP8, generator), rotary_of(MLA)
    pool = SplicePool(tensors, rotary, origins=8)
    slots = torch.arange(1, 91).reshape(9, 10)
    pool.splice(slots[0][:6], slots[1][:6], 100, 90)
    assert pool.turnable(slots[1][:6]).tolist() == [True] * 6
    pool.splice(slots[2][:5], slots[3][:5], 300, 280)  # 3 of the first 6 give way
    assert pool.turnable(slots[1][:6]).tolist() == [False] * 3 + [True] * 3
    before = snapshot(tensors)
    with pytest.raises(OriginGoneError, match="3 rows"):
        pool.splice(slots[1][:6], slots[4][:6], 90, 95)
    assert all(map(torch.equal, before[0], tensors.keys))
    pool.splice(slots[1][:6], slots[4][:6], 90, 90)
    assert torch.equal(tensors.keys[0][slots[4][:6]], tensors.keys[0][slots[1][:6]])
    assert pool.turnable(slots[4][:6]).tolist() == [False] * 3 + [True] * 3
    pool.splice(slots[4][3:6], slots[5][3:6], 93, 500)


def test_rows_beyond_the_ring_are_turned_once(generator: torch.Generator) -> None:
    """A splice of more rows than the ring has turns all, and those without an entry no more."""
    tensors, rotary = random_pool(GQA, FP8, generator), rotary_of(GQA)
    pool = SplicePool(tensors, rotary, origins=4)
    source, target = torch.arange(1, 11), torch.arange(11, 21)
    pool.splice(source, target, 60, 50)
    assert pool.turnable(target).tolist() == [True] * 4 + [False] * 6
    assert pool.turnable(source).all()


def test_freed_slots_and_erased_ones_are_as_computed_again(generator: torch.Generator) -> None:
    """A row that SGLang writes to a slot of an earlier splice is turned like any other."""
    tensors, rotary = random_pool(GQA, FP8, generator), rotary_of(GQA)
    pool = SplicePool(tensors, rotary, origins=4)
    first, second, third = torch.arange(1, 11), torch.arange(11, 21), torch.arange(21, 31)
    pool.splice(first, second, 60, 50)
    pool.freed([second[:8]])
    assert pool.turnable(second).tolist() == [True] * 8 + [False] * 2
    pool.erase(second[8:9])
    assert pool.turnable(second).tolist() == [True] * 9 + [False]
    pool.emptied()
    assert pool.turnable(second) is None
    fresh = [tensors.band(keys[first]) for keys in tensors.keys]
    for keys in tensors.keys:
        keys[second] = keys[first]  # another prefill
    pool.splice(second, third, 700, 70)
    positions = torch.arange(10)
    for keys, key in zip(tensors.keys, fresh, strict=True):
        wanted = turned(key, rotary, positions + 700, positions + 70)
        assert roundings(tensors.band(keys[third]), wanted) <= ONE


def test_an_erasure_elsewhere_makes_no_turned_row_look_as_computed(
    generator: torch.Generator,
) -> None:
    """Rows whose as-computed key gave way stay so when the ring is cleaned."""
    tensors, rotary = random_pool(MLA, FP8, generator), rotary_of(MLA)
    pool = SplicePool(tensors, rotary, origins=10)
    slots = torch.arange(1, 91).reshape(9, 10)
    pool.splice(slots[0], slots[1], 100, 90)
    pool.splice(slots[2], slots[3], 300, 280)
    pool.erase(slots[4])
    assert not pool.turnable(slots[1]).any()
    assert pool.turnable(slots[3]).all()


def test_ranks_agree_on_what_may_be_turned(generator: torch.Generator) -> None:
    """Only rows that every rank may turn are turned, on all of them."""
    tensors, rotary = random_pool(MLA, FP8, generator), rotary_of(MLA)
    others = torch.tensor([True, False, True])
    pool = SplicePool(tensors, rotary, common=lambda rows: rows & others)
    first, second = torch.arange(1, 4), torch.arange(4, 7)
    assert pool.turnable(first) is None
    pool.splice(first, second, 20, 30)
    assert pool.turnable(second).tolist() == others.tolist()
    with pytest.raises(OriginGoneError):
        pool.splice(second, torch.arange(7, 10), 30, 40)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wider_rows_may_always_be_turned(dtype: torch.dtype, generator: torch.Generator) -> None:
    """Without eight bits nothing is refused, and nothing is asked of the device."""
    tensors = random_pool(MLA, dtype, generator)
    pool = SplicePool(tensors, rotary_of(MLA), origins=2)
    slots = torch.arange(1, 31)
    pool.splice(slots[:10], slots[10:20], 60, 50)
    assert pool.turnable(slots) is None
    pool.splice(slots[10:20], slots[20:], 50, 40)


@dataclass
class Row:
    """The key that a slot should hold, and where it stands."""

    key: list[torch.Tensor]
    """As computed, per layer."""
    home: int
    at: int
    state: str = FRESH


class World:
    """A pool and a model of it: random prefills, splices, frees and erasures."""

    def __init__(self, shape: Shape, origins: int, seed: int) -> None:
        self.rng, self.generator = Random(seed), torch.Generator().manual_seed(seed)
        self.tensors, self.rotary = random_pool(shape, FP8, self.generator), rotary_of(shape)
        self.pool = SplicePool(self.tensors, self.rotary, origins=origins)
        self.rows: dict[int, Row] = {}
        self.refused = self.turned = 0

    def idle(self) -> list[int]:
        return [slot for slot in range(1, SLOTS + 1) if slot not in self.rows]

    def prefill(self) -> None:
        """SGLang computes a run of tokens."""
        start = self.rng.randrange(5000)
        chosen = self.rng.sample(self.idle(), min(len(self.idle()), self.rng.randint(1, 12)))
        for at, slot in enumerate(chosen, start):
            for keys in self.tensors.keys:
                drawn = torch.randn(keys.shape[1:], generator=self.generator)
                keys[slot] = self.tensors.encode(drawn)
            key = [self.tensors.band(keys[slot]).clone() for keys in self.tensors.keys]
            self.rows[slot] = Row(key, at, at)

    def splice(self) -> None:
        """Copy a run of rows to another place, or to its own, if it may be turned."""
        by_place = {row.at: slot for slot, row in self.rows.items()}
        if not by_place:
            return
        at = self.rng.choice(list(by_place))
        run = list(itertools.takewhile(bool, map(by_place.get, range(at, at + 8))))
        idle = self.idle()
        if len(idle) < len(run):
            return
        source, target = torch.tensor(run), torch.tensor(self.rng.sample(idle, len(run)))
        dest = self.rng.choice([at, self.rng.randrange(5000), self.rng.randrange(5000)])
        turnable = self.pool.turnable(source)
        may = [True] * len(run) if turnable is None else turnable.tolist()
        assert all(may[i] or self.rows[slot].state == SPLICED for i, slot in enumerate(run))
        if dest != at and not all(may):
            self.refused += 1
            with pytest.raises(OriginGoneError):
                self.pool.splice(source, target, at, dest)
            return
        self.pool.splice(source, target, at, dest)
        for old, new, to in zip(run, target.tolist(), itertools.count(dest), strict=False):
            row = self.rows[old]
            self.turned += row.state == SPLICED and dest != at
            self.rows[new] = Row(row.key, row.home, to, row.state if dest == at else SPLICED)

    def free(self) -> None:
        """The tree evicts some rows; a few are overwritten at once by a forget."""
        gone = [slot for slot in self.rows if self.rng.random() < 0.3]
        for slot in gone:
            del self.rows[slot]
        self.pool.freed([torch.tensor(gone, dtype=torch.int64)])
        if self.rng.random() < 0.2:
            self.pool.erase(torch.tensor(gone, dtype=torch.int64))

    def check(self) -> None:
        """Each row is its as-computed key, turned once."""
        slots = torch.tensor(list(self.rows), dtype=torch.int64)
        if not len(slots):
            return
        homes, places = (
            torch.tensor([getattr(row, name) for row in self.rows.values()])
            for name in ("home", "at")
        )
        for layer, keys in enumerate(self.tensors.keys):
            original = torch.stack([row.key[layer] for row in self.rows.values()])
            wanted = turned(original, self.rotary, homes, places)
            assert roundings(self.tensors.band(keys[slots]), wanted) <= ONE


@pytest.mark.parametrize("shape", [MLA, GQA, SHAPES[4]], ids=lambda shape: shape.name)
@pytest.mark.parametrize("origins", [3, 17, SLOTS])
def test_no_history_of_a_pool_rounds_a_key_twice(shape: Shape, origins: int) -> None:
    """Whatever is prefilled, spliced, freed and erased, each key is off by one rounding, and no row
    as computed is refused."""
    world = World(shape, origins, seed=origins)
    steps = [world.prefill, world.splice, world.splice, world.free]
    for _ in range(300):
        world.rng.choice(steps)()
        world.check()
    assert world.turned > 10
    assert world.refused or origins == SLOTS


def test_the_ring_is_capped_in_bytes() -> None:
    """The ring has an eighth of the slots, less if its bytes are capped, and for eight bits at
    least what they need, or nothing is spliced."""
    wide = read_pool(MHATokenToKVPool(80_000, 1, torch.bfloat16, 2, 64, 1, "cpu", False)).turning(
        0, 64
    )
    packed = read_pool(MHATokenToKVPool(80_000, 1, FP8, 2, 64, 1, "cpu", False)).turning(0, 64)
    small = read_pool(MLATokenToKVPool(500, 1, FP8, 8, 64, 1, "cpu", False)).turning(8, 64)
    assert (bytes_per_origin(wide), bytes_per_origin(packed)) == (256, 128)
    assert origin_rows(wide) == origin_rows(packed) == 10_000
    assert origin_rows(wide, 256 * 99 + 255) == 99
    assert origin_rows(wide, 0) == 1
    assert origin_rows(packed, 128 * 8192) == 8192
    assert origin_rows(small) == 500
    with pytest.raises(OriginsError, match=r"1048576 bytes .* LEYLINE_ORIGIN_BYTES allows 1048575"):
        origin_rows(packed, 128 * 8192 - 1)
    assert SplicePool(small, rotary_of(Shape("", Pairing.HALF_SPLIT, 64))).origins == 500


def test_the_default_cap_gives_way_only_to_what_eight_bits_need() -> None:
    """A wide key is kept for fewer rows than an eighth, a packed one for as many as it takes."""

    @dataclass(frozen=True)
    class Huge(PoolTensors):
        """A pool of more layers than a test can hold: the same tensor many times."""

    one = torch.zeros(1, 64, 128, dtype=torch.bfloat16).expand(400_000, 64, 128)
    wide = Huge("gqa", (one,) * 64, (), 400_000, 0, 128)
    assert origin_rows(wide) == DEFAULT_ORIGIN_BYTES // bytes_per_origin(wide) < 50_000
    bytes_ = torch.zeros(1, 64, 128, dtype=torch.uint8).expand(400_000, 64, 128)
    packed = Huge("gqa", (bytes_,) * 64, (), 400_000, 0, 128, FP8)
    assert bytes_per_origin(packed) * 8192 > DEFAULT_ORIGIN_BYTES
    assert origin_rows(packed) == 8192


def test_the_operators_cap_is_a_number_of_bytes() -> None:
    """A variable that is no number is refused by its name; none leaves the cap to Leyline."""
    assert origin_bytes_from({}) is None
    assert origin_bytes_from({"LEYLINE_ORIGIN_BYTES": ""}) is None
    assert origin_bytes_from({"LEYLINE_ORIGIN_BYTES": "1000"}) == 1000
    for wrong in ("1G", "-5", "1.5", "²"):
        with pytest.raises(ValueError, match="LEYLINE_ORIGIN_BYTES is a number of bytes"):
            origin_bytes_from({"LEYLINE_ORIGIN_BYTES": wrong})


def test_other_pools_of_eight_bits_are_refused_by_name() -> None:
    """Other dtypes, and pools with scales of their own, are each named."""
    refused = [
        (sglang_pool(shape, torch.float8_e5m2), "KV dtype float8_e5m2") for shape in (MLA, GQA)
    ]
    refused.append((sglang_pool(GQA, torch.float8_e4m3fnuz), "KV dtype float8_e4m3fnuz"))
    scaled = sglang_pool(MLA, FP8)
    scaled.kv_scale_buffer = [torch.ones(SLOTS, 1)] * LAYERS
    refused.append((scaled, "scales of its own"))
    blocks = sglang_pool(GQA, FP8)
    blocks.k_scale_buffer = [torch.ones(SLOTS, 1)] * LAYERS
    refused.append((blocks, "quantised KV"))
    for pool, reason in refused:
        with pytest.raises(UnsupportedPoolError, match=reason):
            read_pool(pool)


def test_one_scale_per_layer_is_taken_and_several_are_refused() -> None:
    """A layer's one scale cancels; scales by head or channel are refused where KV has 8 bits."""
    scales = [None, 0.5, torch.tensor(2.0), torch.ones(1)]
    assert read_pool(sglang_pool(MLA, FP8), scales).packed is FP8
    with pytest.raises(UnsupportedPoolError, match="more than one KV scale per layer"):
        read_pool(sglang_pool(MLA, FP8), [*scales, torch.ones(2)])
    assert read_pool(sglang_pool(MLA, torch.bfloat16), [torch.ones(2)]).packed is None


@pytest.mark.parametrize("scale", [0.037, 0.5, 3.3])
def test_the_scale_of_a_layer_cancels(scale: float, generator: torch.Generator) -> None:
    """Decoding with a scale, turning, and encoding with it is what the stored numbers give."""
    tensors, rotary = random_pool(GQA, FP8, generator, spread=150.0), rotary_of(GQA)
    source, target = scattered(generator)
    positions = torch.arange(COUNT)
    SplicePool(tensors, rotary).splice(source, target, 900, 100)
    for keys in tensors.keys:
        real = scale * numbers(tensors.band(keys[source]))
        wanted = turned(real, rotary, positions + 900, positions + 100) / scale
        assert roundings(tensors.band(keys[target]), wanted) <= ONE
