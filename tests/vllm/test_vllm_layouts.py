"""The layout of a layer's KV cache, measured by writing to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from written_layers import (
    BLOCK,
    BLOCKS,
    DIM,
    HEADS,
    LAYOUTS,
    Writer,
    latent_layer,
    layer_of,
)

from leyline_engine.vllm.facts.layouts import (
    LayerLayout,
    UnsupportedLayoutError,
    flat_storage,
    measure_layer,
    row_shape,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def measured(layer: Any) -> LayerLayout:
    """The layout of a layer in blocks of the usual size."""
    return measure_layer(layer, row_shape(layer, BLOCKS, BLOCK))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_are_found_wherever_a_back_end_writes_them(name: str, dtype: torch.dtype) -> None:
    """The measured views show what is written to any slot, and the cache is left as it was."""
    empty, views = LAYOUTS[name]
    cache = empty(dtype)
    layer = layer_of(cache, Writer(views))
    layout = measured(layer)
    assert not flat_storage(cache).any()
    slots = torch.randperm(BLOCKS * BLOCK)[:40]
    key, value = (torch.randn(40, HEADS, DIM).to(dtype) for _ in range(2))
    layer.impl.do_kv_cache_update(layer, key, value, cache, slots)
    keys, values = layout.rows(flat_storage(cache))
    assert values is not None
    assert keys.shape == (BLOCKS, BLOCK, HEADS, DIM)
    assert torch.equal(keys[slots // BLOCK, slots % BLOCK], key)
    assert torch.equal(values[slots // BLOCK, slots % BLOCK], value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_mla_row_is_one_key_without_a_value(dtype: torch.dtype) -> None:
    """The latent and the part that turns are found as one row of one head."""
    cache = torch.zeros(BLOCKS, BLOCK, 32, dtype=dtype)
    layout = measured(latent_layer(cache))
    assert layout.values is None
    cache.copy_(torch.randn(cache.shape))
    keys, _ = layout.rows(flat_storage(cache))
    assert torch.equal(keys[:, :, 0], cache)


def test_values_may_be_wider_than_keys() -> None:
    """A layer whose values have a width of their own is measured by it."""
    cache = torch.zeros(BLOCKS, BLOCK, HEADS, DIM + 12)
    layer = layer_of(cache, Writer(lambda c: (c[..., :DIM], c[..., DIM:])), head_size_v=12)
    layout = measured(layer)
    cache.copy_(torch.randn(cache.shape))
    keys, values = layout.rows(flat_storage(cache))
    assert values is not None
    assert torch.equal(torch.cat((keys, values), dim=-1), cache)


def in_pairs(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys with the tokens of each two dimensions side by side, which takes two strides."""
    return cache[0].permute(0, 2, 1, 3), cache[1]


class PairedWriter(Writer):
    """Writes keys ``[heads, dim / 2, tokens, 2]``, as matrix units want them."""

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, cache: Any, slots: torch.Tensor
    ) -> None:
        """Write rows to slots."""
        paired = cache[0].view(BLOCKS, HEADS, DIM // 2, BLOCK, 2)
        paired[slots // BLOCK, :, :, slots % BLOCK] = key.view(-1, HEADS, DIM // 2, 2)
        cache[1].view(BLOCKS, BLOCK, HEADS, DIM)[slots // BLOCK, slots % BLOCK] = value


class LossyWriter(Writer):
    """Writes keys that are rounded."""

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, cache: Any, slots: torch.Tensor
    ) -> None:
        """Write rows to slots."""
        super().do_kv_cache_update(layer, (key / 16).ceil() * 16, value, cache, slots)


class ScalingWriter(Writer):
    """Keeps the number of writes beside the rows of a block."""

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, cache: Any, slots: torch.Tensor
    ) -> None:
        """Write rows to slots."""
        super().do_kv_cache_update(layer, key, value, cache[..., :-1], slots)
        cache[slots // BLOCK, slots % BLOCK, :, -1] += 1


def _packed_copy(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    copy = cache.clone()
    return copy[..., :DIM], copy[..., DIM:]


REFUSED: dict[str, tuple[Any, str]] = {
    "paired": (
        lambda: layer_of(torch.zeros(2, BLOCKS, HEADS * BLOCK * DIM), PairedWriter(in_pairs)),
        r"no strides describe \(PairedWriter\)",
    ),
    "lossy": (
        lambda: layer_of(
            torch.zeros(2, BLOCKS, BLOCK, HEADS, DIM), LossyWriter(lambda c: (c[0], c[1]))
        ),
        r"don't hold what is written \(LossyWriter\)",
    ),
    "beside": (
        lambda: layer_of(
            torch.zeros(BLOCKS, BLOCK, HEADS, 2 * DIM + 1),
            ScalingWriter(lambda c: (c[..., :DIM], c[..., DIM:])),
        ),
        r"hold more than was written \(ScalingWriter\)",
    ),
    "nowhere": (
        lambda: layer_of(torch.zeros(BLOCKS, BLOCK, HEADS, 2 * DIM), Writer(_packed_copy)),
        r"without a dimension of blocks \(Writer\)",
    ),
    "full": (
        lambda: layer_of(torch.ones(2, BLOCKS, BLOCK, HEADS, DIM), Writer(lambda c: (c[0], c[1]))),
        "a KV cache that isn't empty",
    ),
    "quantised": (
        lambda: layer_of(
            torch.zeros(2, BLOCKS, BLOCK, HEADS, DIM), Writer(in_pairs), kv_cache_dtype="fp8"
        ),
        r"quantised KV cache \(fp8\)",
    ),
    "bytes": (
        lambda: layer_of(torch.zeros(2, BLOCKS, 64, dtype=torch.uint8), Writer(in_pairs)),
        r"quantised KV cache \(auto\)",
    ),
    "shared": (
        lambda: layer_of(torch.zeros(1), Writer(in_pairs), kv_sharing_target_layer_name="layers.0"),
        "layers that share the KV of another layer",
    ),
    "own": (lambda: layer_of(torch.zeros(1), object()), r"writes its KV itself \(object\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rows_that_cannot_be_described_are_refused_by_name(name: str) -> None:
    """A layer is refused in words, and its cache is left as it was."""
    make, reason = REFUSED[name]
    layer = make()
    before = layer.kv_cache.clone()
    with pytest.raises(UnsupportedLayoutError, match=reason):
        measured(layer)
    assert torch.equal(layer.kv_cache, before)


def test_an_mla_layer_with_an_index_key_is_refused() -> None:
    """Sparse attention has KV that isn't in the rows."""
    layer = latent_layer(torch.zeros(BLOCKS, BLOCK, 32))
    layer.indexer = object()
    with pytest.raises(UnsupportedLayoutError, match="DSA"):
        measured(layer)


def test_a_cache_of_few_blocks_is_refused() -> None:
    """Too few blocks don't show how far they are apart."""
    layer = latent_layer(torch.zeros(3, BLOCK, 32))
    with pytest.raises(UnsupportedLayoutError, match="3 blocks, too small"):
        row_shape(layer, 3, BLOCK)
