"""The Triton mover, run by Triton's interpreter, against plain torch and a float64 reference."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from pool_kit import (
    DTYPES,
    FP8,
    LAYERS,
    ROUNDING,
    SHAPES,
    Shape,
    error,
    layered_of,
    random_pool,
    rotary_of,
    roundings,
    turned,
)

from leyline_engine.rotary.rotation import ModelRotary, Pairing, Rotary
from leyline_engine.rows.blocks import pool_of_views
from leyline_engine.rows.mover import PoolTensors, TorchMover
from leyline_engine.rows.pool import SplicePool, choose_mover

COUNT = 13  # no multiple of a tile
# The interpreter cuts bf16 off where hardware and torch round to nearest.
SLACK = {dtype: 2 * ROUNDING[dtype] if dtype == torch.bfloat16 else 0.0 for dtype in DTYPES}
SLACK[FP8] = 0.0


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The kernel's module, made for the interpreter; as it was before, afterwards."""
    with monkeypatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        module = importlib.import_module("leyline_engine.rows.kernel")
        yield importlib.reload(module)
    importlib.reload(module)


@pytest.fixture
def generator() -> torch.Generator:
    """A new seed in each run, shown where a test fails."""
    generator = torch.Generator()
    print(f"seed {generator.seed()}")
    return generator


def twins(
    kernel: ModuleType,
    shape: Shape,
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    origins: int,
    rotary: ModelRotary | None = None,
) -> tuple[SplicePool, SplicePool]:
    """Two pools with the same contents, one moved by torch and one by the kernel."""
    tensors, rotary = random_pool(shape, dtype, generator), rotary or rotary_of(shape)
    copies = replace(
        tensors,
        keys=tuple(t.clone() for t in tensors.keys),
        values=tuple(t.clone() for t in tensors.values),
    )
    return (
        SplicePool(tensors, rotary, origins=origins, mover=TorchMover(tensors, rotary)),
        SplicePool(copies, rotary, origins=origins, mover=kernel.TritonMover(copies, rotary)),
    )


def spread(tensors: PoolTensors, block: int) -> PoolTensors:
    """The first slots of a pool, in blocks with heads in front of tokens, keys by dimension, and
    an element of nobody after each block."""

    def views(rows: tuple[torch.Tensor, ...], *, by_dim: bool) -> list[torch.Tensor]:
        found = []
        for each in rows:
            blocks, (heads, dim) = len(each) // block, each.shape[1:]
            size = heads * block * dim
            token, step = (1, block) if by_dim else (dim, 1)
            view = torch.zeros(blocks * (size + 1), dtype=each.dtype).as_strided(
                (blocks, block, heads, dim), (size + 1, token, block * dim, step)
            )
            found.append(view.copy_(each[: blocks * block].reshape(view.shape)))
        return found

    found = pool_of_views(
        views(tensors.keys, by_dim=True), views(tensors.values, by_dim=False), packed=tensors.packed
    )
    return found.turning(tensors.rotary_start, tensors.rotary_dim)


def gathered(tensors: PoolTensors, slots: int) -> PoolTensors:
    """A copy of a pool's first slots, a row each."""
    every = torch.arange(slots)
    keys, values = tensors.key_rows(every), tensors.value_rows(every)
    return replace(
        tensors,
        keys=tuple(layer[keys] for layer in tensors.keys),
        values=tuple(layer[values] for layer in tensors.values),
        key_paging=None,
        value_paging=None,
    )


def assert_alike(one: PoolTensors, other: PoolTensors, slots: torch.Tensor) -> None:
    """All bits equal; the rotary part of ``slots`` as near as the interpreter rounds."""
    for a, b in zip((*one.keys, *one.values), (*other.keys, *other.values), strict=True):
        slack = SLACK[one.dtype] if any(a is keys for keys in one.keys) else 0.0
        if not slack:
            assert torch.equal(a, b)
            continue
        near, far = one.band(a).clone(), other.band(b).clone()
        assert float((near[slots].float() - far[slots].float()).abs().max()) <= slack * float(
            near.float().abs().max()
        )
        rest_a, rest_b = a.clone(), b.clone()
        one.band(rest_a)[slots] = 0
        other.band(rest_b)[slots] = 0
        assert torch.equal(rest_a, rest_b)


@pytest.mark.parametrize("dtype", [*DTYPES, FP8], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_the_kernel_moves_rows_as_torch_does(
    kernel: ModuleType, shape: Shape, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """Fresh rows, rows with an origin and a ring that wraps: the same bits in pool and ring."""
    one, other = twins(kernel, shape, dtype, generator, origins=COUNT + 4)
    slots = torch.randperm(90, generator=generator) + 1
    hops = [slots[COUNT * i : COUNT * (i + 1)] for i in range(4)]
    mixed = torch.cat((hops[1][:7], hops[3][:6]))
    for pool in (one, other):
        pool.splice(hops[0], hops[1], 4000, 3900)
        pool.splice(mixed, hops[2], 3900, 5000)
    moved = torch.cat((hops[1], hops[2]))
    assert_alike(one.tensors, other.tensors, moved)
    if dtype != torch.bfloat16:
        assert torch.equal(one.as_computed, other.as_computed)
        assert one.as_computed.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_the_kernel_moves_rows_in_blocks(
    kernel: ModuleType, shape: Shape, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """Rows that aren't contiguous: there and back, the bits of a pool of one row per slot."""
    tensors, rotary = random_pool(shape, dtype, generator), rotary_of(shape)
    blocked = spread(tensors, 5)
    assert blocked.key_paging is not None and blocked.key_paging != blocked.value_paging
    flat = SplicePool(gathered(tensors, 95), rotary, origins=40)
    other = SplicePool(blocked, rotary, origins=40, mover=kernel.TritonMover(blocked, rotary))
    source, target, back = torch.randperm(95, generator=generator)[: 3 * COUNT].split(COUNT)
    for pool in (flat, other):
        pool.splice(source, target, 4000, 3900)
        pool.splice(target, back, 3900, 4000)
    moved = torch.cat((target, back))
    assert_alike(flat.tensors, gathered(other.tensors, 95), moved)
    assert torch.equal(other.as_computed, flat.as_computed)
    for layer in other.tensors.keys:
        came, went = other.tensors.key_rows(source), other.tensors.key_rows(back)
        assert torch.equal(layer[came], layer[went])
    other.erase(moved)
    assert not other.as_computed.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_the_kernel_turns_keys_right(
    kernel: ModuleType, shape: Shape, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """The kernel's result is the float64 turn, within the rounding of the dtype."""
    _, pool = twins(kernel, shape, dtype, generator, origins=COUNT)
    tensors, rotary = pool.tensors, pool.rotary
    order = torch.randperm(90, generator=generator) + 1
    source, target = order[:COUNT], order[COUNT : 2 * COUNT]
    keys = [tensors.band(layer[source]) for layer in tensors.keys]
    pool.splice(source, target, 9000, 123)
    positions = torch.arange(COUNT)
    for layer in range(LAYERS):
        wanted = turned(keys[layer], rotary, positions + 9000, positions + 123)
        got = tensors.band(tensors.keys[layer][target])
        assert error(got, wanted, rotary) <= ROUNDING[dtype] + SLACK[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_each_layer_turns_by_its_own_rotation(
    kernel: ModuleType, shape: Shape, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """Both movers, there and back: the float64 turn of the layer, and not that of another."""
    rotary = layered_of(shape)
    order = torch.randperm(90, generator=generator) + 1
    source, target, back = order[:COUNT], order[COUNT : 2 * COUNT], order[2 * COUNT : 3 * COUNT]
    for pool in twins(kernel, shape, dtype, generator, origins=COUNT, rotary=rotary):
        tensors, at = pool.tensors, torch.arange(COUNT)
        pool.splice(source, target, 9000, 123)
        pool.splice(target, back, 123, 9000)
        for layer, keys in enumerate(tensors.keys):
            own, got = tensors.band(keys[source]), tensors.band(keys[target])
            right = turned(own, rotary.at(layer), at + 9000, at + 123)
            wrong = turned(own, rotary.at((layer + 1) % LAYERS), at + 9000, at + 123)
            assert error(got, right, rotary.at(layer)) <= ROUNDING[dtype] + SLACK[dtype]
            assert error(got, wrong, rotary.at(layer)) > 10 * (ROUNDING[dtype] + SLACK[dtype])
            assert torch.equal(tensors.band(keys[back]), own)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize(("start", "dest"), [(9000, 123), (123, 123)])
def test_the_kernel_turns_any_bytes_as_torch_does(
    kernel: ModuleType, shape: Shape, start: int, dest: int, generator: torch.Generator
) -> None:
    """Zeros of both signs, subnormals, what is clamped, and NaN come out with torch's bits."""
    one, other = twins(kernel, shape, FP8, generator, origins=COUNT)
    for keys, copies in zip(one.tensors.keys, other.tensors.keys, strict=True):
        keys.copy_(torch.randint(256, keys.shape, generator=generator, dtype=torch.uint8))
        keys[1] = 126  # 448: of a pair of these, one becomes as large or larger, however it turns
        copies.copy_(keys)
    source, target = torch.arange(1, COUNT + 1), torch.arange(COUNT + 1, 2 * COUNT + 1)
    for pool in (one, other):
        pool.splice(source, target, start, dest)
    for keys, copies in zip(one.tensors.keys, other.tensors.keys, strict=True):
        nan = (keys & 127) == 127
        assert torch.equal(nan, (copies & 127) == 127)  # which of the two NaN is no matter
        assert torch.equal(keys[~nan], copies[~nan])
        assert start == dest or ((keys[target] & 127) == 126).any()


class Shrinking(Rotary):
    """Makes keys three quarters as long, so that every other one is between two e4m3 numbers."""

    def turns(
        self, computed_at: torch.Tensor, needed_at: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos = torch.full((len(computed_at), self.dim // 2), 0.75)
        return cos, torch.zeros_like(cos)


def test_the_kernel_rounds_to_even_as_torch_does(kernel: ModuleType) -> None:
    """Numbers in the middle of two get the one whose last bit is 0, subnormal ones as well."""
    shape = SHAPES[2]
    one = random_pool(shape, FP8, torch.Generator())
    for keys in one.keys:
        keys.copy_(torch.arange(keys.numel()).reshape(keys.shape) % 256)
    other = replace(one, keys=tuple(keys.clone() for keys in one.keys))
    source, target = torch.arange(1, 9), torch.arange(11, 19)
    rotary = Shrinking(rotary_of(shape).inv_freq, shape.pairing)
    for tensors, mover in ((one, TorchMover), (other, kernel.TritonMover)):
        SplicePool(tensors, rotary, mover=mover(tensors, rotary)).splice(source, target, 5, 6)
    for keys, copies in zip(one.keys, other.keys, strict=True):
        finite = (keys & 127) != 127
        assert torch.equal(keys[finite], copies[finite])
        even = one.decode(keys[source]) * 0.75
        wanted = one.decode(one.encode(even))
        there = finite[target]
        assert torch.equal(one.decode(keys[target])[there], wanted[there])


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_the_kernel_turns_fp8_keys_right(
    kernel: ModuleType, shape: Shape, generator: torch.Generator
) -> None:
    """The kernel's result is the float64 turn, rounded once, and clamped."""
    tensors, rotary = random_pool(shape, FP8, generator, spread=150.0), rotary_of(shape)
    pool = SplicePool(tensors, rotary, mover=kernel.TritonMover(tensors, rotary))
    source, target = torch.arange(1, COUNT + 1), torch.arange(COUNT + 1, 2 * COUNT + 1)
    positions = torch.arange(COUNT)
    keys = [tensors.band(layer[source]) for layer in tensors.keys]
    pool.splice(source, target, 9000, 123)
    for layer, key in zip(tensors.keys, keys, strict=True):
        wanted = turned(key, rotary, positions + 9000, positions + 123)
        assert roundings(tensors.band(layer[target]), wanted) <= 1.0001
        wrong = turned(key, rotary, positions + 9000, positions + 124)
        assert roundings(tensors.band(layer[target]), wrong) > 10


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("mistake", ["pairing", "base", "off by one", "no rotation"])
def test_the_reference_notices_a_kernel_that_turns_wrongly(
    kernel: ModuleType, shape: Shape, mistake: str, generator: torch.Generator
) -> None:
    """Control: the kernel with a wrong pairing, base or position is far off."""
    tensors, rotary = random_pool(shape, torch.bfloat16, generator), rotary_of(shape)
    wrong, dest = rotary, 123
    match mistake:
        case "pairing":
            wrong = replace(rotary, pairing=next(p for p in Pairing if p is not rotary.pairing))
        case "base":
            wrong = rotary_of(shape, base=8000.0)
        case "off by one":
            dest = 124
        case "no rotation":
            dest = 9000
    pool = SplicePool(tensors, wrong, mover=kernel.TritonMover(tensors, wrong))
    source, target = torch.arange(1, COUNT + 1), torch.arange(COUNT + 1, 2 * COUNT + 1)
    keys = tensors.band(tensors.keys[0][source])
    pool.splice(source, target, 9000, dest)
    positions = torch.arange(COUNT)
    wanted = turned(keys, rotary, positions + 9000, positions + 123)
    got = tensors.band(tensors.keys[0][target])
    assert error(got, wanted, rotary) > 10 * (ROUNDING[torch.bfloat16] + SLACK[torch.bfloat16])


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_the_kernel_believes_only_origins_that_certify_themselves(
    kernel: ModuleType, shape: Shape, generator: torch.Generator
) -> None:
    """One changed element of one layer's key is enough, in any head; untouched rows stay true."""
    one, other = twins(kernel, shape, torch.float16, generator, origins=2 * COUNT)
    source, target = torch.arange(1, COUNT + 1), torch.arange(COUNT + 1, 2 * COUNT + 1)
    for pool in (one, other):
        pool.splice(source, target, 50, 70)
        tensors = pool.tensors
        tensors.band(tensors.keys[1])[target[2], -1, -1] += 0.5
        tensors.band(tensors.keys[LAYERS - 1])[target[5], 0, 0] += 0.5
        pool.splice(target, target + COUNT, 70, 90)
    assert_alike(one.tensors, other.tensors, target)
    homes = torch.arange(COUNT)
    for pool in (one, other):
        tensors = pool.tensors
        origin = pool.rotary.rotate(tensors.band(tensors.keys[0][source]), homes + 50, homes + 90)
        got = tensors.band(tensors.keys[0][target + COUNT])
        believed = (origin == got).flatten(1).all(dim=1)
        assert believed[[0, 1, 3, 4, 6]].all()


def test_the_kernel_erases_like_torch(kernel: ModuleType, generator: torch.Generator) -> None:
    """Orphans are found by the kernel's own certificate."""
    one, other = twins(kernel, SHAPES[0], torch.float16, generator, origins=COUNT)
    for pool in (one, other):
        pool.splice(torch.arange(1, 9), torch.arange(11, 19), 50, 70)
        pool.tensors.keys[0][12] = 0
        pool.erase(torch.tensor([13, 14]))
    assert_alike(one.tensors, other.tensors, torch.arange(11, 19))
    assert torch.equal(one.as_computed, other.as_computed)
    kept = one.as_computed.flatten(2).any(dim=2)
    assert kept.sum(dim=1).tolist() == [5] * LAYERS


def test_the_mover_is_chosen_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool on a GPU gets the kernel, every other pool plain torch."""
    tensors = random_pool(SHAPES[0], torch.float32, torch.Generator())
    rotary = rotary_of(SHAPES[0])
    assert isinstance(choose_mover(tensors, rotary), TorchMover)

    class OnGpu(PoolTensors):
        """A pool that says it lies on a GPU."""

        @property
        def device(self) -> torch.device:
            return torch.device("cuda")

    on_gpu: Any = OnGpu("gqa", tensors.keys, (), 0, 16, 8)
    made = object()
    kernel = importlib.import_module("leyline_engine.rows.kernel")
    monkeypatch.setattr(kernel, "TritonMover", lambda *_: made)
    assert choose_mover(on_gpu, rotary) is made
