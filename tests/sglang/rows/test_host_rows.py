"""Rows of SGLang's own host pools: which are overwritten, looked at and refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import build_kv_host_pool
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.runtime_context import get_context
from sglang.srt.server_args import ServerArgs

from leyline_engine.rotary.rotation import Pairing, Rotary
from leyline_engine.rows.pool import SplicePool
from leyline_engine.sglang.rows.host import HostRows
from leyline_engine.sglang.rows.layouts import UnsupportedPoolError, read_pool
from leyline_lab.sglang_cpu.host_tier import copy_rows, register_host_tier

SLOTS, LAYERS = 40, 3
LAYOUTS = ("layer_first", "page_first")


def device_pool(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """A pool of the device's."""
    if kind == "mla":
        return MLATokenToKVPool(SLOTS, 1, dtype, 8, 4, LAYERS, "cpu", False)
    return MHATokenToKVPool(SLOTS, 1, dtype, 2, 8, LAYERS, "cpu", False)


def host_pool(device: Any, layout: str) -> Any:
    """SGLang's host pool of it, full of ones."""
    register_host_tier()
    get_context().set_server_args(
        ServerArgs(model_path="none", device="cpu", hicache_ratio=1.5, hicache_mem_layout=layout)
    )
    pool = build_kv_host_pool(kv_pool=device, page_size=1)
    pool.kv_buffer.view(torch.uint8).fill_(1)
    return pool


def layers_of(pool: Any) -> list[torch.Tensor]:
    """Each layer's rows, as bytes."""
    layers = pool.data_refs if hasattr(pool, "data_refs") else pool.k_data_refs + pool.v_data_refs
    return [layer.contiguous().view(torch.uint8) for layer in layers]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["mla", "gqa"])
def test_only_the_given_rows_are_overwritten(kind: str, layout: str, dtype: torch.dtype) -> None:
    """In every layer, keys and values, and none of another slot; who watches is told."""
    device = device_pool(kind, dtype)
    pool = host_pool(device, layout)
    rows = HostRows(pool, read_pool(device).turning(0, 4))
    told: list[torch.Tensor] = []
    rows.erased = told.append
    slots = torch.tensor([3, 7, len(rows) - 1])
    rows.erase(slots)
    other = torch.ones(len(rows), dtype=torch.bool)
    other[slots] = False
    for layer in layers_of(pool):
        assert not layer[slots].any()
        assert layer[other].all()
    assert [each.tolist() for each in told] == [[slot + SLOTS + 1 for slot in slots.tolist()]]


def test_free_slots_are_overwritten_once_they_held_something() -> None:
    """Slots in use stay; those that were freed, or flushed, are zero after a scrub."""
    device = device_pool("gqa")
    pool = host_pool(device, "layer_first")
    pool.kv_buffer.zero_()
    rows = HostRows(pool, read_pool(device).turning(0, 4))
    kept, freed = pool.alloc(10), pool.alloc(10)
    for layer in pool.k_data_refs + pool.v_data_refs:
        layer[torch.cat([kept, freed])] = 1
    pool.free(freed)
    assert rows.filled_free().tolist() == [slot + SLOTS + 1 for slot in freed.tolist()]
    rows.freed(freed)
    assert rows.is_stale(freed) and not rows.is_stale(kept)
    rows.scrub()
    assert not len(rows.filled_free()) and not rows.is_stale(freed)
    assert all(layer[kept].flatten(1).any(dim=1).all() for layer in layers_of(pool))
    rows.emptied()
    pool.clear()
    rows.scrub()
    assert not pool.kv_buffer.any()


def test_what_copies_left_on_their_way_is_overwritten() -> None:
    """SGLang's kernels gather rows on the device before they go to the host; those go, too."""
    device = device_pool("mla")
    pool = host_pool(device, "page_first")
    order: list[str] = []
    pool.staging_buffer = torch.ones(4, LAYERS, 1, 12)
    rows = HostRows(
        pool, read_pool(device).turning(8, 4), behind_copies=lambda: order.append("waited")
    )
    rows.scrub()
    assert not pool.staging_buffer.any()
    assert order == ["waited"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["mla", "gqa"])
def test_parts_are_the_devices_of_the_last_layer(kind: str, layout: str) -> None:
    """Rows of one group are equal where KV is, and are numbered after the device's."""
    device = device_pool(kind)
    pool = host_pool(device, layout)
    tensors = read_pool(device).turning(8 if kind == "mla" else 0, 4)
    splicing = SplicePool(tensors, Rotary(torch.ones(2), Pairing.HALF_SPLIT))
    device_parts = {part.group: part for part in splicing.parts()}
    parts = HostRows(pool, tensors).parts()
    assert {part.group for part in parts} == {
        name for name in device_parts if name.startswith(f"free {LAYERS - 1} ")
    }
    for tensor in (*tensors.keys, *tensors.values):
        tensor.copy_(torch.randn(tensor.shape))
    own, its = torch.tensor([5, 9]), torch.tensor([11, 2])
    hosts = pool.data_refs if kind == "mla" else pool.k_data_refs + pool.v_data_refs
    copy_rows([*tensors.keys, *tensors.values], hosts, own, its, 1)
    for part in parts:
        entries = part.entries(its.numpy() + SLOTS + 1)
        assert entries.tolist() == its.tolist()
        assert torch.equal(part.at(entries), device_parts[part.group].at(own.numpy()))
        assert part.slots([11]) == {11: [11 + SLOTS + 1]}
        assert part.entries(own.numpy()).tolist() == [-1, -1]
        assert device_parts[part.group].entries(its.numpy() + SLOTS + 1).tolist() == [-1, -1]


@pytest.mark.parametrize("layout", ["page_first_direct", "page_head"])
def test_another_layout_is_refused(layout: str) -> None:
    """Slots without a row of their own in each layer can't be overwritten."""
    device = device_pool("gqa")
    with pytest.raises(UnsupportedPoolError, match=layout):
        HostRows(host_pool(device, layout), read_pool(device))


def test_a_pool_of_another_form_than_the_devices_is_refused() -> None:
    """Fewer layers, or wider rows: the host's are no copies of the device's."""
    device = device_pool("gqa")
    pool = host_pool(device, "layer_first")
    other = MHATokenToKVPool(SLOTS, 1, torch.float32, 2, 16, LAYERS, "cpu", False)
    for tensors in (read_pool(other), read_pool(device_pool("mla"))):
        with pytest.raises(UnsupportedPoolError, match="other rows"):
            HostRows(pool, tensors)


def test_copies_of_rows_that_are_not_contiguous_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With heads in front of tokens, the host's rows aren't those of the device's slots."""
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    device = MHATokenToKVPool(SLOTS, 4, torch.float32, 2, 8, LAYERS, "cpu", False)
    tensors = read_pool(device)
    monkeypatch.undo()
    pool = host_pool(device_pool("gqa"), "layer_first")
    with pytest.raises(UnsupportedPoolError, match="SGLANG_USE_HND_KVCACHE"):
        HostRows(pool, tensors)


def test_copies_of_parts_of_pages_are_refused() -> None:
    """The stand-in for SGLang's kernel takes whole pages, as that does."""
    layers = [torch.zeros(8, 2)]
    with pytest.raises(ValueError, match="3 rows"):
        copy_rows(layers, layers, torch.arange(3), torch.arange(3), 2)
