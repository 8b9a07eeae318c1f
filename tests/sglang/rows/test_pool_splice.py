"""Splicing rows of SGLang's own KV pools: keys turn, nothing else changes, erased is erased."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from pool_kit import (
    DTYPES,
    LAYERS,
    ROUNDING,
    SHAPES,
    SLOTS,
    Shape,
    banded,
    error,
    random_pool,
    rotary_of,
    sglang_pool,
    snapshot,
    turned,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

from leyline_engine.rotary.rotation import Pairing, Rotary
from leyline_engine.rows.pool import SplicePool
from leyline_engine.sglang.rows.layouts import UnsupportedPoolError, read_pool

COUNT = 20


@pytest.fixture
def generator() -> torch.Generator:
    """A new seed in each run, shown where a test fails: what is claimed holds for all inputs."""
    generator = torch.Generator()
    print(f"seed {generator.seed()}")
    return generator


def scattered(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Source and target slots in no order, disjoint."""
    order = torch.randperm(SLOTS, generator=generator) + 1
    return order[:COUNT], order[COUNT : 2 * COUNT]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize(("start", "dest"), [(4000, 3300), (40, 60_000)])
def test_a_splice_turns_the_rotary_part_and_leaves_the_rest(
    shape: Shape, dtype: torch.dtype, start: int, dest: int, generator: torch.Generator
) -> None:
    """Targets hold the turned keys within one rounding, all else of every slot keeps its bits."""
    tensors, rotary = random_pool(shape, dtype, generator), rotary_of(shape)
    source, target = scattered(generator)
    keys, values = snapshot(tensors)
    SplicePool(tensors, rotary).splice(source, target, start, dest)

    positions = torch.arange(COUNT)
    for layer in range(LAYERS):
        wanted = turned(
            tensors.band(keys[layer][source]), rotary, positions + start, positions + dest
        )
        got = tensors.band(tensors.keys[layer][target])
        assert error(got, wanted, rotary) <= ROUNDING[dtype]
        keys[layer][target] = keys[layer][source]
        tensors.band(keys[layer])[target] = got
        assert torch.equal(tensors.keys[layer], keys[layer])
    for layer, old in enumerate(values):
        old[target] = old[source]
        assert torch.equal(tensors.values[layer], old)


def _laid(layout: str, count: int) -> torch.Tensor:
    """Slots of one run, of two that are apart, or of none; all within the first 600."""
    if layout == "none":
        return 2 * torch.arange(count) + 1
    late = layout == "two" and torch.arange(count) >= count // 2
    return torch.arange(count) + 1 + 200 * torch.as_tensor(late)


@pytest.mark.parametrize("sources", ["one", "two", "none"])
@pytest.mark.parametrize("targets", ["one", "two", "none"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_neighbouring_slots_are_spliced_like_any_others(
    shape: Shape, sources: str, targets: str, generator: torch.Generator
) -> None:
    """Wherever rows lie, two splices in a row leave the same bits in the targets."""
    count, rotary = 140, rotary_of(shape)
    rows = random_pool(shape, torch.float32, generator)
    found = []
    for apart in (False, True):
        slots = 2000
        keys = tuple(torch.zeros(slots, *layer.shape[1:]) for layer in rows.keys)
        values = tuple(torch.zeros(slots, *layer.shape[1:]) for layer in rows.values)
        tensors = replace(rows, keys=keys, values=values, capacity=slots - 1)
        source, middle = _laid(sources, count), 600 + _laid(targets, count)
        target = 1200 + _laid(sources, count)
        if apart:
            order = torch.randperm(1999, generator=generator) + 1
            source, middle, target = order[: 3 * count].view(3, count)
        for full, few in zip((*keys, *values), (*rows.keys, *rows.values), strict=True):
            full[source] = few[1 + torch.arange(count) % (few.shape[0] - 1)]
        pool = SplicePool(tensors, rotary)
        pool.splice(source, middle, 500, 420)
        pool.splice(middle, target, 420, 7)
        found.append([each[part] for each in (*keys, *values) for part in (middle, target)])
    assert all(map(torch.equal, *found))


def _off_by_one(rotary: Rotary, start: int, dest: int) -> tuple[Rotary, int, int]:
    return rotary, start, dest + 1


def _not_at_all(rotary: Rotary, start: int, dest: int) -> tuple[Rotary, int, int]:
    return rotary, start, start


def _other_base(rotary: Rotary, start: int, dest: int) -> tuple[Rotary, int, int]:
    return replace(rotary, inv_freq=rotary.inv_freq**1.1), start, dest


def _other_pairing(rotary: Rotary, start: int, dest: int) -> tuple[Rotary, int, int]:
    other = next(pairing for pairing in Pairing if pairing is not rotary.pairing)
    return replace(rotary, pairing=other), start, dest


def _other_way(rotary: Rotary, start: int, dest: int) -> tuple[Rotary, int, int]:
    return rotary, dest, start


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize(
    "mistake", [_off_by_one, _not_at_all, _other_base, _other_pairing, _other_way]
)
def test_the_reference_notices_a_wrong_turn(
    shape: Shape,
    mistake: Callable[[Rotary, int, int], tuple[Rotary, int, int]],
    generator: torch.Generator,
) -> None:
    """Control: each wrong way to turn is far outside the tolerance of the test above."""
    start, dest = 4000, 3300
    tensors, rotary = random_pool(shape, torch.bfloat16, generator), rotary_of(shape)
    source, target = scattered(generator)
    positions = torch.arange(COUNT)
    wanted = turned(
        tensors.band(tensors.keys[0][source]), rotary, positions + start, positions + dest
    )
    wrong_rotary, wrong_start, wrong_dest = mistake(rotary, start, dest)
    SplicePool(tensors, wrong_rotary).splice(source, target, wrong_start, wrong_dest)
    got = tensors.band(tensors.keys[0][target])
    assert error(got, wanted, rotary) > 20 * ROUNDING[torch.bfloat16]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_splice_to_the_same_position_is_a_copy(shape: Shape, generator: torch.Generator) -> None:
    """Rows that keep their position keep their bits, and take no room in the ring."""
    tensors = random_pool(shape, torch.bfloat16, generator)
    source, target = scattered(generator)
    pool = SplicePool(tensors, rotary_of(shape), origins=COUNT)
    pool.splice(source, target, 700, 700)
    for tensor in (*tensors.keys, *tensors.values):
        assert torch.equal(tensor[target], tensor[source])


def test_a_splice_of_many_rows_is_the_same_in_pieces(generator: torch.Generator) -> None:
    """More rows than one step takes are moved like few."""
    shape = SHAPES[0]
    pool = MLATokenToKVPool(20_000, 1, torch.float32, 8, shape.rotary_dim, 1, "cpu", False)
    tensors = banded(pool, shape)
    tensors.keys[0].copy_(torch.randn(tensors.keys[0].shape, generator=generator))
    source, target = torch.arange(1, 9_001), torch.arange(10_000, 19_000)
    wanted = rotary_of(shape).rotate(
        tensors.band(tensors.keys[0][source]), torch.arange(9_000) + 5, torch.arange(9_000)
    )
    SplicePool(tensors, rotary_of(shape)).splice(source, target, 5, 0)
    assert torch.equal(tensors.band(tensors.keys[0][target]), wanted)


def test_nothing_to_splice_is_fine_and_unequal_lists_are_refused() -> None:
    """No slots is no work; a source without a target is the caller's mistake."""
    tensors = banded(sglang_pool(SHAPES[0], torch.float32), SHAPES[0])
    pool = SplicePool(tensors, rotary_of(SHAPES[0]))
    none = torch.empty(0, dtype=torch.int64)
    pool.splice(none, none, 3, 5)
    with pytest.raises(ValueError, match="1 source slots and 0 target slots"):
        pool.splice(torch.tensor([1]), none, 3, 5)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_erased_rows_and_their_origins_are_gone(shape: Shape, generator: torch.Generator) -> None:
    """Nothing of an erased row is left, in the pool or beside it; other rows keep their bits."""
    tensors = random_pool(shape, torch.bfloat16, generator)
    pool = SplicePool(tensors, rotary_of(shape))
    source, target = scattered(generator)
    pool.splice(source[:10], target[:10], 100, 90)
    beside = pool.bytes_beside
    keys, values = snapshot(tensors)
    gone = torch.cat((source[:4], target[:4]))
    pool.erase(gone)
    for old, tensor in zip((*keys, *values), (*tensors.keys, *tensors.values), strict=True):
        assert not tensor[gone].any()
        assert old[gone].any()
        expected = old.clone()
        expected[gone] = 0
        assert torch.equal(tensor, expected)
    kept = [{tuple(row.flatten().tolist()) for row in layer} for layer in pool.as_computed]
    for layer, old in enumerate(keys):
        lost, held = (
            {tuple(row.flatten().tolist()) for row in tensors.band(old[rows])}
            for rows in (source[:4], source[4:10])
        )
        assert kept[layer].isdisjoint(lost)
        assert held <= kept[layer]
    assert pool.bytes_beside == beside


def test_what_is_kept_beside_is_small_and_bounded(generator: torch.Generator) -> None:
    """By default less than a sixteenth of the pool is held beside it, however much is spliced."""
    shape = Shape("gqa", Pairing.HALF_SPLIT, 64)
    tensors = banded(MHATokenToKVPool(4096, 1, torch.bfloat16, 4, 64, 8, "cpu", False), shape)
    pool = SplicePool(tensors, rotary_of(shape))
    whole = tensors.bytes_per_token * tensors.slots
    before = pool.bytes_beside
    assert before < whole / 15
    for _ in range(4):
        order = torch.randperm(4096, generator=generator)
        pool.splice(order[:2000], order[2000:4000], 50, 10)
    assert pool.bytes_beside == before


def test_other_pool_classes_and_layouts_are_refused_by_name() -> None:
    """A subclass, a foreign class and another layout are each named."""

    class Derived(MHATokenToKVPool):
        """A subclass may keep more than its base does."""

    refused = [
        (Derived(8, 1, torch.float32, 1, 8, 1, "cpu", False), "Derived"),
        (object(), "object"),
    ]
    page_major = sglang_pool(SHAPES[2], torch.float32)
    page_major.kv_cache_layout = "page_major"
    refused.append((page_major, "page_major"))
    uneven = sglang_pool(SHAPES[2], torch.float32)
    uneven.k_buffer = [uneven.k_buffer[0], uneven.k_buffer[1][:-1], uneven.k_buffer[2]]
    refused.append((uneven, "layers differ"))
    strided = sglang_pool(SHAPES[2], torch.float32)
    strided.v_buffer = [buffer.transpose(1, 2) for buffer in strided.v_buffer]
    refused.append((strided, "contiguous"))
    for pool, reason in refused:
        with pytest.raises(UnsupportedPoolError, match=reason):
            read_pool(pool)


def test_a_band_lies_within_a_key() -> None:
    """More turning dimensions than a key has are a mistake, before any row is moved."""
    tensors = read_pool(sglang_pool(SHAPES[2], torch.float32))
    assert tensors.turning(0, 32).rotary_dim == 32
    for start, dim in ((0, 64), (-2, 8), (24, 16)):
        with pytest.raises(ValueError, match="keys of 32 dimensions"):
            tensors.turning(start, dim)


@pytest.mark.parametrize("erase", [SplicePool.erase, SplicePool.erase_used])
def test_rows_are_erased_behind_the_forwards_in_flight(
    erase: Callable[[SplicePool, torch.Tensor], None], generator: torch.Generator
) -> None:
    """A forward that still writes to a slot writes before it is erased, and no row survives it."""
    tensors, rotary = random_pool(SHAPES[0], torch.float32, generator), rotary_of(SHAPES[0])
    slots = torch.arange(1, COUNT + 1)
    flying = [tensor[slots].clone() for tensor in tensors.keys]
    for keys in tensors.keys:
        keys[slots] = 0

    def land() -> None:
        for keys, written in zip(tensors.keys, flying, strict=True):
            keys[slots] = written
        flying.clear()

    def behind_forwards() -> None:
        if flying:
            land()

    pool = SplicePool(tensors, rotary, behind_forwards=behind_forwards)
    erase(pool, slots)
    if flying:
        land()
    assert not any(keys[slots].any() for keys in tensors.keys)
