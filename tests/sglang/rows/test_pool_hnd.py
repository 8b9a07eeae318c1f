"""Splices in SGLang's own pools with heads in front of tokens, whose rows SGLang wrote itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pool_kit import FP8, LAYERS, ROUNDING, SHAPES, Shape, error, rotary_of, roundings, turned
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from leyline_engine.rows.pool import SplicePool
from leyline_engine.sglang.rows.layouts import read_pool

PAGE, SLOTS, COUNT = 8, 96, 21
HEADED = [shape for shape in SHAPES if not shape.mla]


@pytest.fixture
def hnd(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's setting for pools of this layout."""
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")


def filled_pool(shape: Shape, dtype: torch.dtype) -> Any:
    """A pool of SGLang's, every slot written by SGLang."""
    pool = MHATokenToKVPool(
        SLOTS,
        PAGE,
        dtype,
        shape.heads,
        shape.key_dim,
        LAYERS,
        "cpu",
        False,
        v_head_dim=shape.value_dim,
    )
    every = torch.arange(SLOTS + PAGE)
    for layer in range(LAYERS):
        keys = torch.randn(len(every), shape.heads, shape.key_dim).to(dtype)
        values = torch.randn(len(every), shape.heads, shape.value_dim).to(dtype)
        pool.set_kv_buffer(None, every, keys, values, layer_id_override=layer)
    return pool


def rows(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Rows ``[n, heads, dim]`` of a layer ``[pages, heads, slots per page, dim]``."""
    return buffer[slots // PAGE, :, slots % PAGE, :]


@pytest.mark.usefixtures("hnd")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("shape", HEADED, ids=lambda shape: shape.name)
@pytest.mark.parametrize("dest", [3300, 4000], ids=["turned", "control"])
def test_a_splice_turns_the_rows_that_sglang_wrote(
    shape: Shape, dtype: torch.dtype, dest: int
) -> None:
    """Keys of all heads turn and values keep their bits; unturned keys (control) are far off."""
    pool, rotary = filled_pool(shape, dtype), rotary_of(shape)
    assert pool.kv_cache_layout == "hnd"
    assert pool.k_buffer[0].shape == (13, shape.heads, PAGE, shape.key_dim)
    tensors = read_pool(pool).turning(0, shape.rotary_dim)
    assert (tensors.slots, tensors.capacity, tensors.dtype) == (SLOTS + PAGE, SLOTS, dtype)
    source, target = (torch.randperm(SLOTS) + PAGE)[: 2 * COUNT].split(COUNT)
    before = [layer.clone() for layer in (*pool.k_buffer, *pool.v_buffer)]
    SplicePool(tensors, rotary).splice(source, target, 4000, dest)
    at, width = torch.arange(COUNT), shape.rotary_dim
    for old, keys in zip(before, pool.k_buffer, strict=False):
        wanted = turned(rows(old, source)[..., :width], rotary, at + 4000, at + 3300)
        got = rows(keys, target)[..., :width]
        if dtype == FP8:
            off = roundings(got, wanted)
        else:
            off = error(got, wanted, rotary) / ROUNDING[dtype]
        assert off <= 1.001 if dest == 3300 else off > 10
    for old, new in zip(before, (*pool.k_buffer, *pool.v_buffer), strict=True):
        moved = rows(old, source)
        if any(new is keys for keys in pool.k_buffer):
            moved[..., :width] = rows(new, target)[..., :width]
        old[target // PAGE, :, target % PAGE, :] = moved
        assert torch.equal(old, new)


@pytest.mark.usefixtures("hnd")
def test_an_erased_slot_leaves_the_others_of_its_page() -> None:
    """Zeros in every head and layer of these slots, and in no other."""
    pool = filled_pool(HEADED[0], torch.bfloat16)
    splicing = SplicePool(read_pool(pool).turning(0, HEADED[0].rotary_dim), rotary_of(HEADED[0]))
    slots = torch.tensor([9, 14, 40])
    before = [layer.clone() for layer in (*pool.k_buffer, *pool.v_buffer)]
    splicing.erase(slots)
    for old, new in zip(before, (*pool.k_buffer, *pool.v_buffer), strict=True):
        assert rows(old, slots).any()
        old[slots // PAGE, :, slots % PAGE, :] = 0
        assert torch.equal(old, new)
