"""Splices and erasures in pools whose blocks lie in memory in any order, against float64.

The reference looks at each layer's memory alone: it computes where an element lies, and turns keys
as complex numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import pytest
import torch

from leyline_engine.proof.digests import RowDigester, filled
from leyline_engine.rotary.rotation import Pairing, Rotary
from leyline_engine.rows.blocks import RowLayout, Strides, pool_of_tensors
from leyline_engine.rows.pool import SplicePool

LAYERS, BLOCKS, HEADS, DIM, VALUE_DIM = 2, 7, 3, 16, 12
FP8 = torch.float8_e4m3fn
DTYPES = (torch.float32, torch.bfloat16, FP8)
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, FP8: torch.uint8}
FRACTION = {torch.float32: 23, torch.bfloat16: 7, FP8: 3}
START, DEST = 9000, 123


@dataclass(frozen=True)
class Shape:
    """Blocks of one layer in its memory."""

    elements: int
    block: int
    keys: RowLayout
    values: RowLayout | None


def dense(block: int) -> Shape:
    """``[2, blocks, B, H, D]``: a slot's row is its number."""
    keys = RowLayout(HEADS, DIM, Strides(0, block * HEADS * DIM, HEADS * DIM, DIM, 1))
    half = BLOCKS * keys.strides.block
    return Shape(2 * half, block, keys, replace(keys, strides=replace(keys.strides, offset=half)))


def packed_blocks(block: int) -> Shape:
    """``[blocks, 2, B, H, D]``: keys and values of a block side by side."""
    half, row = block * HEADS * DIM, HEADS * DIM
    keys = RowLayout(HEADS, DIM, Strides(0, 2 * half, row, DIM, 1))
    values = replace(keys, strides=replace(keys.strides, offset=half))
    return Shape(2 * half * BLOCKS, block, keys, values)


def packed_rows(block: int) -> Shape:
    """``[blocks, H, B, 2 D]``: heads in front of tokens, a value after each key."""
    keys = RowLayout(HEADS, DIM, Strides(0, HEADS * block * 2 * DIM, 2 * DIM, block * 2 * DIM, 1))
    values = replace(keys, strides=replace(keys.strides, offset=DIM))
    return Shape(BLOCKS * keys.strides.block, block, keys, values)


def dim_major(block: int) -> Shape:
    """``[2, blocks, H, D, B]`` and ``[2, blocks, H, B, D]``: keys of a head by their dimensions."""
    size = HEADS * block * DIM
    keys = RowLayout(HEADS, DIM, Strides(0, size, 1, DIM * block, block))
    values = RowLayout(HEADS, DIM, Strides(BLOCKS * size, size, DIM, block * DIM, 1))
    return Shape(2 * BLOCKS * size, block, keys, values)


def latent(block: int) -> Shape:
    """``[blocks, B, D]`` of an MLA model, with a few elements of nobody after each block."""
    strides = Strides(2, block * DIM + 5, DIM, 0, 1)
    return Shape(2 + BLOCKS * strides.block, block, RowLayout(1, DIM, strides), None)


def drawn(block: int) -> Shape:
    """Dimensions in a random order, with unused elements after each of them."""
    order = torch.randperm(5).tolist()
    sizes, strides, stride = (BLOCKS, block, HEADS, max(DIM, VALUE_DIM), 2), [0] * 5, 1
    for at in order:
        strides[at] = stride
        stride = stride * sizes[at] + int(torch.randint(4, ()))
    offset = int(torch.randint(9, ()))
    keys = RowLayout(HEADS, DIM, Strides(offset, *strides[:4]))
    values = RowLayout(HEADS, VALUE_DIM, replace(keys.strides, offset=offset + strides[4]))
    return Shape(offset + stride, block, keys, values)


Layout = Callable[[int], Shape]
LAYOUTS: tuple[Layout, ...] = (dense, packed_blocks, packed_rows, dim_major, latent, drawn, drawn)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """A new seed in each test, shown where it fails."""
    print(f"seed {torch.seed()}")


class Case:
    """A pool of random contents, and its memory."""

    def __init__(self, layout: Layout, dtype: torch.dtype, block: int = 6) -> None:
        self.shape, self.dtype = layout(block), dtype
        numbers = 20 * torch.randn(LAYERS, self.shape.elements)
        self.memory = list(numbers.to(dtype))
        latent_width = 0 if self.shape.values else DIM - 8
        pairing = Pairing.INTERLEAVED if latent_width else Pairing.HALF_SPLIT
        # Not all of a key turns.
        self.band = slice(latent_width, latent_width + 8)
        self.rotary = Rotary(1.0 / 100.0 ** (torch.arange(4) / 4), pairing)
        self.pool = self.open(self.shape)

    def open(self, shape: Shape) -> SplicePool:
        """A pool on the same memory."""
        tensors = pool_of_tensors(
            self.memory,
            blocks=BLOCKS,
            block_size=shape.block,
            keys=shape.keys,
            values=shape.values,
        )
        return SplicePool(tensors.turning(self.band.start, 8), self.rotary, origins=256)

    def where(self, slots: torch.Tensor, rows: RowLayout) -> torch.Tensor:
        """Places in memory of slots' elements, ``[n, heads, dim]``."""
        at, (block, token) = rows.strides, (slots // self.shape.block, slots % self.shape.block)
        first = at.offset + block * at.block + token * at.token
        heads, dims = torch.arange(rows.heads) * at.head, torch.arange(rows.dim) * at.dim
        return first[:, None, None] + heads[:, None] + dims

    def bits(self) -> list[torch.Tensor]:
        """A copy of each layer's memory, as integers."""
        return [layer.view(BITS[self.dtype]).clone() for layer in self.memory]

    def slots(self, count: int) -> torch.Tensor:
        """Different slots in a random order."""
        return torch.randperm(BLOCKS * self.shape.block)[:count]

    def excess(self, before: torch.Tensor, after: torch.Tensor, dest: int) -> float:
        """Largest error of turned keys ``[n, heads, 8]``, as a multiple of what rounding may do."""
        first, second = slice(0, 4), slice(4, 8)
        if self.rotary.pairing is Pairing.INTERLEAVED:
            first, second = slice(0, 8, 2), slice(1, 8, 2)
        keys, got = before.double(), after.double()
        rows = np.arange(len(keys), dtype=np.float32)[:, None]
        frequencies = self.rotary.inv_freq.numpy()
        angles = ((rows + dest) * frequencies).astype(np.float64) - (rows + START) * frequencies
        wanted = torch.view_as_complex(torch.stack((keys[..., first], keys[..., second]), -1))
        wanted = wanted * torch.from_numpy(np.exp(1j * angles))[:, None, :]
        result = torch.stack((got[..., first], got[..., second]), -1)
        numbers = torch.view_as_real(wanted)
        steps = torch.frexp(numbers.abs().clamp(min=2.0**-6)).exponent - 1 - FRACTION[self.dtype]
        allowed = torch.exp2(steps.double() - 1) + wanted.abs()[..., None] * 2.0**-20
        return float(((result - numbers).abs() / allowed).max())


def keys_of(case: Case, memory: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Keys in a layer's memory, ``[n, heads, dim]``."""
    return memory[case.where(slots, case.shape.keys)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize(("block", "count"), [(6, 14), (96, 250)], ids=["scattered", "runs"])
def test_rows_are_copied_and_turned_and_nothing_else_changes(
    layout: Layout, dtype: torch.dtype, block: int, count: int
) -> None:
    """Values and the still part of keys keep their bits, and so does what belongs to nobody."""
    case = Case(layout, dtype, block)
    every = torch.arange(BLOCKS * block)
    source, target = every[5 : 5 + count], every[7 + count : 7 + 2 * count]
    if block == 6:
        source, target = case.slots(2 * count).split(count)
    before = case.bits()
    keys = [keys_of(case, layer, source) for layer in case.memory]
    case.pool.splice(source, target, START, DEST)
    for layer, own, old, new in zip(case.memory, keys, before, case.bits(), strict=True):
        got = keys_of(case, layer, target)
        assert case.excess(own[..., case.band], got[..., case.band], DEST) <= 1.001
        to, come = case.where(target, case.shape.keys), case.where(source, case.shape.keys)
        old[to] = old[come]
        old[to[..., case.band]] = new[to[..., case.band]]
        if case.shape.values is not None:
            old[case.where(target, case.shape.values)] = old[case.where(source, case.shape.values)]
        assert torch.equal(old, new)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_keys_come_back_with_all_their_bits(layout: Layout, dtype: torch.dtype) -> None:
    """A row that returns to its position is turned from its as-computed key, not from a rounded."""
    case = Case(layout, dtype)
    source, target, back = case.slots(42).split(14)
    case.pool.splice(source, target, START, DEST)
    for layer in case.memory:
        assert not torch.equal(keys_of(case, layer, source), keys_of(case, layer, target))
    case.pool.splice(target, back, DEST, START)
    for layer in case.bits():
        came, went = case.where(source, case.shape.keys), case.where(back, case.shape.keys)
        assert torch.equal(layer[came], layer[went])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mistake", ["no rotation", "off by one", "heads and tokens swapped"])
def test_the_reference_notices_mistakes(mistake: str, dtype: torch.dtype) -> None:
    """Control: keys that weren't turned, or stand in another place, are far off."""
    case = Case(packed_rows, dtype)
    pool, dest = case.pool, {"no rotation": START, "off by one": DEST + 1}.get(mistake, DEST)
    if mistake == "heads and tokens swapped":
        at = case.shape.keys.strides
        # What a dense layout of the same block would be.
        wrong = replace(at, token=HEADS * 2 * DIM, head=2 * DIM)
        pool = case.open(replace(case.shape, keys=replace(case.shape.keys, strides=wrong)))
    source, target = case.slots(28).split(14)
    keys = keys_of(case, case.memory[0], source)
    pool.splice(source, target, START, dest)
    got = keys_of(case, case.memory[0], target)
    assert case.excess(keys[..., case.band], got[..., case.band], DEST) > 10


@pytest.mark.parametrize("used", [False, True], ids=["erase", "erase_used"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_an_erased_row_leaves_its_neighbours(layout: Layout, used: bool) -> None:
    """Exactly its elements are zero, and no as-computed key of it is left beside the pool."""
    case = Case(layout, torch.bfloat16)
    source, target = case.slots(28).split(14)
    case.pool.splice(source, target, START, DEST)
    assert case.pool.as_computed.any()
    before, told = case.bits(), list[torch.Tensor]()
    case.pool.erased = told.append
    (case.pool.erase_used if used else case.pool.erase)(target)
    for old, new in zip(before, case.bits(), strict=True):
        for rows in (case.shape.keys, case.shape.values):
            if rows is not None:
                old[case.where(target, rows)] = 0
        assert torch.equal(old, new)
    assert not case.pool.as_computed.any()
    case.pool.erase_used(target)
    assert [len(slots) for slots in told] == [14, 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_proofs_see_the_rows_of_slots(layout: Layout, dtype: torch.dtype) -> None:
    """Digests, single rows and filled slots are those of the same rows in a tensor of their own."""
    case = Case(layout, dtype)
    every = torch.arange(BLOCKS * case.shape.block)
    last = case.memory[-1].view(BITS[dtype])
    parts = [part for part in case.pool.parts() if part.place == "pool"]
    keys = last[case.where(every, case.shape.keys)]
    still = [keys[..., : case.band.start], keys[..., case.band.stop :]]
    wanted = [rows for rows in still if rows.shape[-1]] + [keys[..., case.band]]
    if case.shape.values is not None:
        wanted.insert(0, last[case.where(every, case.shape.values)])
    assert len(parts) == len(wanted)
    some = np.array([9, 2, 40])
    for part, rows in zip(parts, wanted, strict=True):
        digester = RowDigester(b"key")
        assert np.array_equal(digester.digest(part.rows), digester.digest(rows))
        ends = np.array([0, len(every) - 1, len(every)])
        assert part.entries(ends).tolist() == [0, len(every) - 1, -1]
        assert torch.equal(part.at(some).view(BITS[dtype]), rows[torch.from_numpy(some)])
    case.pool.erase(torch.tensor([2, 3]))
    free = np.array([1, 2, 3, 4])
    assert filled(case.pool.every_tensor, free).tolist() == [1, 4]


def test_packed_keys_that_gave_way_are_named() -> None:
    """Rows of 8 bits may be turned again only while their as-computed keys are kept."""
    case = Case(packed_rows, FP8)
    pool = SplicePool(case.pool.tensors, case.rotary, origins=10)
    first, second, third = case.slots(24).split(8)
    assert pool.turnable(first) is None
    pool.splice(first, second, START, DEST)
    turnable = pool.turnable(torch.cat((first, second)))
    assert turnable is not None and turnable.all()
    pool.splice(first, third, START, DEST)
    turnable = pool.turnable(second)
    assert turnable is not None and 0 < int(turnable.sum()) < 8


def test_rows_one_after_another_are_seen_as_such() -> None:
    """A slot's row is its number where strides allow, whether or not it is contiguous."""
    flat = Case(dense, torch.float32).pool.tensors
    assert flat.key_paging is None and flat.value_paging is None
    assert flat.slots == len(flat.keys[0]) == flat.capacity == 6 * BLOCKS
    for layout in (packed_blocks, packed_rows, dim_major, latent):
        tensors = Case(layout, torch.float32).pool.tensors
        assert tensors.key_paging is not None
        assert tensors.slots == tensors.capacity == 6 * BLOCKS
        elements = HEADS * DIM * 2 if tensors.values else DIM
        assert tensors.bytes_per_token == LAYERS * elements * 4
    assert Case(dim_major, FP8).pool.tensors.packed == FP8


def test_what_can_not_be_a_pool_is_refused() -> None:
    """Elements outside of the memory or in each other's place, and dtypes without a rounding."""
    strides = Strides(0, 64, 16, 8, 1)
    rows = RowLayout(2, 8, strides)

    def opens(rows: RowLayout, *tensors: torch.Tensor, packed: torch.dtype | None = None) -> None:
        pool_of_tensors(tensors, blocks=3, block_size=4, keys=rows, values=None, packed=packed)

    enough = torch.zeros(prod((3, 4, 2, 8)))
    opens(rows, enough, enough.clone())
    for wrong in (
        replace(strides, offset=1),
        replace(strides, offset=-1),
        replace(strides, block=65),
    ):
        with pytest.raises(ValueError, match="doesn't fit"):
            opens(replace(rows, strides=wrong), enough)
    with pytest.raises(ValueError, match="doesn't fit"):
        opens(replace(rows, strides=replace(strides, offset=8)), torch.zeros(400)[8:200])
    for shared in (replace(strides, token=8), replace(strides, head=4), replace(strides, dim=0)):
        with pytest.raises(ValueError, match="share memory"):
            opens(replace(rows, strides=shared), enough)
    with pytest.raises(ValueError, match="several dtypes"):
        opens(rows, enough, enough.bfloat16())
    with pytest.raises(ValueError, match="float8_e5m2"):
        opens(rows, enough.to(torch.uint8), packed=torch.float8_e5m2)
    with pytest.raises(ValueError, match="0 layers"):
        opens(rows)
