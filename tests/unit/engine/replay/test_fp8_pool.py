"""KV that the replay engine keeps in eight bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from leyline_engine.rotary.rotation import Pairing, Rotary
from leyline_replay.cache.pool import KVLayout, KVPool
from leyline_replay.factory import read_kv_dtype

FP8 = torch.float8_e4m3fn
LAYOUT = KVLayout("gqa", (((2, 16), (2, 8)),), 0, 0, 16, torch.float32, FP8)
ROTARY = Rotary(1.0 / 100.0 ** (torch.arange(8) / 8), Pairing.HALF_SPLIT)
SLOTS = np.arange(4, dtype=np.int64)


def written() -> tuple[KVPool, tuple[torch.Tensor, torch.Tensor]]:
    """A pool with four tokens at 50 and on, some numbers too large for eight bits."""
    pool = KVPool(LAYOUT, 16, ROTARY, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    pair = tuple(100 * torch.randn(4, 2, dim, generator=generator) for dim in (16, 8))
    pair[0][0, 0, 0] = 1e6
    pool.write(SLOTS, 50, [(pair[0], pair[1])])
    return pool, (pair[0], pair[1])


def test_what_is_read_was_rounded_once() -> None:
    """Numbers are those of eight bits that are nearest, at most 448, in the model's dtype."""
    pool, pair = written()
    for got, given in zip(pool.read(0, SLOTS), pair, strict=True):
        assert got.dtype == torch.float32
        assert torch.equal(got, given.clamp(-448, 448).to(FP8).float())
    assert LAYOUT.bytes_per_token == 2 * (16 + 8 + 16)


def test_a_thousand_copies_round_like_one() -> None:
    """Keys are turned from what was computed, however often they are copied."""
    pool, _ = written()
    once, _ = written()
    places = [SLOTS, SLOTS + 4]
    for step in range(1000):
        pool.copy(places[step % 2], places[(step + 1) % 2], 10 + step)
    once.copy(SLOTS, SLOTS + 4, 1009)
    for got, wanted in zip(pool.read(0, SLOTS), once.read(0, SLOTS + 4), strict=True):
        assert torch.equal(got, wanted)
    assert not torch.equal(pool.read(0, SLOTS)[0], written()[0].read(0, SLOTS)[0])


def test_other_dtypes_are_refused_by_name() -> None:
    """An operator reads what there is."""
    assert read_kv_dtype("auto") is None
    assert read_kv_dtype("fp8_e4m3") is FP8
    with pytest.raises(
        ValueError, match="kv_dtype can't be fp8_e5m2; choose one of auto, fp8_e4m3"
    ):
        read_kv_dtype("fp8_e5m2")
