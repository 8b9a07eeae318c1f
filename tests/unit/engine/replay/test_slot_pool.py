"""The pool: copies keep values, rounding doesn't pile up, erased is erased."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leyline_engine.rotary.rotation import Pairing, Rotary
from leyline_replay.cache.pool import KVLayout, KVPool
from leyline_replay.cache.slots import SlotAllocator

CAPACITY = 64
INV_FREQ = 1.0 / 10000.0 ** (torch.arange(0, 16, 2, dtype=torch.float32) / 16)


def layout(kind: str, dtype: torch.dtype) -> KVLayout:
    """GQA: the key turns, in its second half; MLA: only k_pe."""
    if kind == "gqa":
        return KVLayout("gqa", (((2, 32), (2, 24)),) * 2, 0, 16, 16, dtype)
    return KVLayout("mla_latent", (((1, 32), (1, 16)),) * 2, 1, 0, 16, dtype)


def make_pool(kind: str = "gqa", dtype: torch.dtype = torch.float32) -> KVPool:
    """An empty pool."""
    rotary = Rotary(INV_FREQ, Pairing.HALF_SPLIT)
    return KVPool(layout(kind, dtype), CAPACITY, rotary, torch.device("cpu"))


def fill(pool: KVPool, count: int, start: int, seed: int = 0) -> np.ndarray:
    """Random KV in slots 0…count of positions start…"""
    generator = torch.Generator().manual_seed(seed)
    pairs = [
        tuple(
            torch.randn(count, heads, dim, generator=generator).to(pool.layout.dtype)
            for heads, dim in pool.layout.shapes[0]
        )
        for _ in range(pool.layout.layers)
    ]
    slots = np.arange(count, dtype=np.int64)
    pool.write(slots, start, pairs)  # type: ignore[arg-type]
    return slots


def band(pool: KVPool, layer: int, slots: np.ndarray) -> torch.Tensor:
    """The rotary band of the keys."""
    tensor = pool.read(layer, slots)[pool.layout.rotary_tensor]
    begin = pool.layout.rotary_start
    return tensor[..., begin : begin + pool.layout.rotary_dim]


@pytest.mark.parametrize("kind", ["gqa", "mla"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copy_turns_only_the_rotary_band(kind: str, dtype: torch.dtype) -> None:
    """Values, latents and unrotated key dimensions stay bit-equal; the band is R(δ) of the old."""
    pool = make_pool(kind, dtype)
    source = fill(pool, 10, start=50)
    target = np.arange(20, 30, dtype=np.int64)
    before = [[t.clone() for t in pool.read(layer, source)] for layer in range(2)]
    pool.copy(source, target, 37)
    for layer in range(2):
        for index, old in enumerate(before[layer]):
            new = pool.read(layer, target)[index]
            assert torch.equal(pool.read(layer, source)[index], old)
            if index != pool.layout.rotary_tensor:
                assert torch.equal(new, old)
                continue
            kept = torch.ones(old.shape[-1], dtype=torch.bool)
            kept[pool.layout.rotary_start : pool.layout.rotary_start + 16] = False
            assert torch.equal(new[..., kept], old[..., kept])
            expected = pool.rotary.rotate(
                old[..., ~kept], torch.arange(50, 60), torch.arange(37, 47)
            )
            assert torch.equal(new[..., ~kept], expected)
            assert not torch.equal(new[..., ~kept], old[..., ~kept])


def test_copy_in_place_of_position_is_bit_equal() -> None:
    """A copy to the same position changes no bit, and neither does a way out and back."""
    pool = make_pool(dtype=torch.bfloat16)
    source = fill(pool, 4, start=9)
    there, back = np.arange(4, 8), np.arange(8, 12)
    pool.copy(source, there, 9)
    assert torch.equal(band(pool, 1, there), band(pool, 1, source))
    pool.copy(source, there, 500)
    pool.copy(there, back, 9)
    assert torch.equal(band(pool, 0, back), band(pool, 0, source))


def test_two_hundred_copies_are_as_good_as_one() -> None:
    """Rounding doesn't pile up, because each copy rotates the key as it was computed."""
    pool = make_pool(dtype=torch.bfloat16)
    source = fill(pool, 8, start=100)
    places = np.random.default_rng(3).integers(0, 3000, 200).tolist()
    current, spare = np.arange(8, 16), np.arange(16, 24)
    pool.copy(source, current, places[0])
    naive = pool.rotary.rotate(
        band(pool, 0, source), torch.arange(100, 108), torch.arange(places[0], places[0] + 8)
    )
    for previous, place in pairwise(places):
        pool.copy(current, spare, place)
        current, spare = spare, current
        naive = pool.rotary.rotate(
            naive, torch.arange(previous, previous + 8), torch.arange(place, place + 8)
        )
    direct = np.arange(24, 32)
    pool.copy(source, direct, places[-1])
    for layer in range(2):
        assert torch.equal(band(pool, layer, current), band(pool, layer, direct))
    exact = pool.rotary.rotate(
        band(pool, 0, source).double().float(),
        torch.arange(100, 108),
        torch.arange(places[-1], places[-1] + 8),
    )
    chained = (band(pool, 0, current).float() - exact).abs().max()
    drifted = (naive.float() - exact).abs().max()
    assert drifted > 5 * chained


def test_erase_leaves_nothing() -> None:
    """Erased slots hold zeros in every tensor; so does a copy made of them; others are whole."""
    pool = make_pool()
    slots = fill(pool, 6, start=5)
    kept = pool.read(0, slots[4:])[0].clone()
    pool.erase(slots[:4])
    pool.copy(slots[:4], np.arange(30, 34), 700)
    for gone in (slots[:4], np.arange(30, 34)):
        for layer in range(2):
            assert all(not tensor.any() for tensor in pool.read(layer, gone))
            assert not pool._as_computed[layer][torch.from_numpy(gone)].any()
    assert torch.equal(pool.read(0, slots[4:])[0], kept)


def test_bytes_per_token_counts_every_tensor() -> None:
    """The advertised size is that of the tensors."""
    pool = make_pool("mla", torch.bfloat16)
    stored = sum(t.nbytes for pair in pool._tensors for t in pair)
    stored += sum(t.nbytes for t in pool._as_computed)
    assert pool.layout.bytes_per_token * CAPACITY == stored


@given(st.lists(st.integers(-4, 6), max_size=40))
def test_allocator_gives_each_slot_once(steps: list[int]) -> None:
    """Held and free slots are always a partition; too large a wish takes nothing."""
    allocator = SlotAllocator(12)
    held: list[np.ndarray] = []
    for step in steps:
        if step >= 0:
            free = allocator.free_count
            slots = allocator.allocate(step)
            assert (slots is None) == (step > free)
            if slots is None:
                assert allocator.free_count == free
            else:
                held.append(slots)
        elif held:
            allocator.release(held.pop(step % len(held)))
        every = np.concatenate([allocator.free_slots(), *held])
        assert sorted(every.tolist()) == list(range(12))


def test_allocator_refuses_more_than_it_gave() -> None:
    """Releasing into a full allocator is a bug and says so."""
    allocator = SlotAllocator(4)
    with pytest.raises(RuntimeError, match="more slots"):
        allocator.release(np.array([0]))
