"""The places of keys and values in a layer's KV cache, measured by writing to it.

Backends of vLLM pack their caches in many ways, and names don't say how. The layer's own write path
puts numbers into slots; where each number is found gives the strides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

_BASE = 255
_DIGITS = 3
"""Numbers are written as digits from 1 to 255, which every KV dtype here holds exactly."""
_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
_KINDS = frozenset({"auto", "bfloat16", "float16", "float32"})
"""Values of ``--kv-cache-dtype`` that keep rows as they are."""
_LEAST_BLOCKS = 4


class UnsupportedLayoutError(Exception):
    """A KV cache's rows can't be described by strides, or must not be copied."""


@dataclass(frozen=True, slots=True)
class Strides:
    """The places of a layer's keys or values in a storage, in elements.

    Element (block, token, head, dim) lies at ``offset`` and the strides' multiples of these.
    """

    offset: int
    block: int
    token: int
    head: int
    dim: int


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """The measured places of one layer's rows."""

    keys: Strides
    values: Strides | None
    """None if a key's row holds everything (MLA)."""
    blocks: int
    block_tokens: int
    """Tokens of a block as the backend's kernels count them; token slots number through."""
    heads: int
    key_dim: int
    value_dim: int
    """0 if a key's row holds everything (MLA)."""

    def rows(self, storage: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return keys and values as views ``[blocks, block_tokens, heads, dim]`` of a storage.

        Args:
            storage: one-dimensional, from the first element that the tensor's memory has.
        """
        keys = self._view(storage, self.keys, self.key_dim)
        if self.values is None:
            return keys, None
        return keys, self._view(storage, self.values, self.value_dim)

    def _view(self, storage: torch.Tensor, strides: Strides, dim: int) -> torch.Tensor:
        return storage.as_strided(
            (self.blocks, self.block_tokens, self.heads, dim),
            (strides.block, strides.token, strides.head, strides.dim),
            strides.offset,
        )


@dataclass(frozen=True, slots=True)
class RowShape:
    """The shape of a layer's rows, as its write path takes them, and their blocks."""

    blocks: int
    block_tokens: int
    heads: int
    key_dim: int
    value_dim: int
    """0 if a key's row holds everything (MLA); ``key_dim`` is that of the whole row then."""

    @property
    def width(self) -> int:
        """Elements of one token."""
        return self.heads * (self.key_dim + self.value_dim)


def flat_storage(cache: torch.Tensor) -> torch.Tensor:
    """Return the memory behind a cache as one dimension of its dtype."""
    storage = cache.untyped_storage()
    flat = torch.empty(0, dtype=cache.dtype, device=cache.device)
    return flat.set_(storage, 0, (storage.nbytes() // cache.element_size(),))  # type: ignore[call-overload,no-any-return]


def row_shape(layer: Any, blocks: int, block_tokens: int) -> RowShape:
    """Return the shape of an attention layer's rows.

    Args:
        layer: vLLM's ``Attention`` or ``MLAAttention`` with a KV cache bound to it.
        blocks: blocks of the cache as kernels count them.
        block_tokens: tokens of each.

    Raises:
        UnsupportedLayoutError: the layer's rows are quantised, shared or of another kind.
    """
    if getattr(layer, "kv_sharing_target_layer_name", None):
        raise UnsupportedLayoutError("layers that share the KV of another layer")
    cache = getattr(layer, "kv_cache", None)
    if not isinstance(cache, torch.Tensor) or not hasattr(layer.impl, "do_kv_cache_update"):
        raise UnsupportedLayoutError(f"attention that writes its KV itself ({_backend(layer)})")
    kind = str(getattr(layer, "kv_cache_dtype", "auto"))
    if kind not in _KINDS or cache.dtype not in _DTYPES:
        raise UnsupportedLayoutError(f"quantised KV cache ({kind})")
    if blocks < _LEAST_BLOCKS:
        raise UnsupportedLayoutError(f"a KV cache of {blocks} blocks, too small to measure")
    if _is_mla(layer):
        if getattr(layer, "indexer", None) is not None or getattr(layer, "use_sparse", False):
            raise UnsupportedLayoutError("sparse attention with an index key (DSA)")
        width = int(layer.kv_lora_rank) + int(layer.qk_rope_head_dim)
        return RowShape(blocks, block_tokens, 1, width, 0)
    heads, dim = int(layer.num_kv_heads), int(layer.head_size)
    return RowShape(
        blocks, block_tokens, heads, dim, int(getattr(layer, "head_size_v", dim) or dim)
    )


def measure_layer(layer: Any, shape: RowShape) -> LayerLayout:
    """Measure where a layer's write path puts keys and values.

    The cache must hold zeros in the blocks that are tried, and does so again afterwards.

    Args:
        layer: see :func:`row_shape`; its ``impl`` writes.
        shape: of its rows.

    Raises:
        UnsupportedLayoutError: the places aren't affine, or the cache isn't empty.
    """
    blocks = sorted({1, 2, shape.blocks // 2, shape.blocks - 1})
    axis = _block_axis(layer, shape, blocks[0])
    found = {block: _places(layer, shape, axis, block) for block in blocks}
    turning = shape.heads * shape.key_dim
    keys = {block: places[:, :turning] for block, places in found.items()}
    values = {block: places[:, turning:] for block, places in found.items()}
    return LayerLayout(
        _strides(layer, keys, shape.heads),
        _strides(layer, values, shape.heads) if shape.value_dim else None,
        shape.blocks,
        shape.block_tokens,
        shape.heads,
        shape.key_dim,
        shape.value_dim,
    )


def _backend(layer: Any) -> str:
    return type(layer.impl).__name__.removesuffix("Impl")


def _is_mla(layer: Any) -> bool:
    return hasattr(layer, "kv_lora_rank")


def _write(layer: Any, rows: torch.Tensor, shape: RowShape, block: int) -> None:
    """Write rows ``[block_tokens, width]`` into a block as the layer's forward does."""
    cache: torch.Tensor = layer.kv_cache
    rows = rows.to(cache.device, cache.dtype)
    slots = torch.arange(len(rows), device=cache.device) + block * shape.block_tokens
    if _is_mla(layer):
        rank = int(layer.kv_lora_rank)
        layer.impl.do_kv_cache_update(
            rows[:, :rank].contiguous(),
            rows[:, rank:].contiguous()[:, None],
            cache,
            slots,
            layer.kv_cache_dtype,
            layer._k_scale,
        )
        return
    split = shape.heads * shape.key_dim
    keys = rows[:, :split].reshape(len(rows), shape.heads, shape.key_dim)
    values = rows[:, split:].reshape(len(rows), shape.heads, shape.value_dim)
    layer.impl.do_kv_cache_update(layer, keys.contiguous(), values.contiguous(), cache, slots)


@contextmanager
def _written(
    layer: Any, rows: torch.Tensor, shape: RowShape, views: Sequence[torch.Tensor], block: int
) -> Iterator[None]:
    """Write rows into an empty block for a time, and zeros in the end.

    Args:
        layer: the layer.
        rows: ``[block_tokens, width]``.
        shape: of them.
        views: all that may hold them.
        block: its number.
    """
    if any(bool(view.any()) for view in views):
        raise UnsupportedLayoutError("a KV cache that isn't empty")
    try:
        _write(layer, rows, shape, block)
        yield
        _write(layer, torch.zeros_like(rows), shape, block)
        left = any(bool(view.any()) for view in views)
    finally:
        for view in views:
            view.zero_()
    if left:
        raise UnsupportedLayoutError(f"KV rows that hold more than was written ({_backend(layer)})")


def _block_axis(layer: Any, shape: RowShape, block: int) -> int:
    """Return the dimension of a layer's cache that counts blocks."""
    cache: torch.Tensor = layer.kv_cache
    axes = [axis for axis, size in enumerate(cache.shape) if size == shape.blocks]
    views = [cache.select(axis, block) for axis in axes]
    ones = torch.ones(shape.block_tokens, shape.width)
    with _written(layer, ones, shape, views, block):
        counts = [int(view.count_nonzero()) for view in views]
    whole = [axis for axis, count in zip(axes, counts, strict=True) if count == ones.numel()]
    if len(whole) != 1:
        raise UnsupportedLayoutError(
            f"a KV cache without a dimension of blocks ({_backend(layer)})"
        )
    return whole[0]


def _places(layer: Any, shape: RowShape, axis: int, block: int) -> torch.Tensor:
    """Return where each element of a block's rows lies in the storage, int64 on the CPU.

    ``[block_tokens, width]``, the elements of a token's keys before those of its values.
    """
    view = layer.kv_cache.select(axis, block)
    count = shape.block_tokens * shape.width
    numbers = torch.arange(count).view(shape.block_tokens, shape.width)
    found = torch.zeros(view.shape, dtype=torch.int64)
    written = torch.ones(view.shape, dtype=torch.bool)
    for digit in range(_DIGITS):
        rows = numbers // _BASE**digit % _BASE + 1
        with _written(layer, rows, shape, [view], block):
            held = view.to("cpu", torch.float64).to(torch.int64)
        written &= held > 0
        found += (held - 1) * _BASE**digit
    order = found[written]
    if order.numel() != count or not torch.equal(order.sort().values, numbers.flatten()):
        raise UnsupportedLayoutError(f"KV rows that don't hold what is written ({_backend(layer)})")
    places = torch.empty(count, dtype=torch.int64)
    places[order] = _offsets(view)[written]
    return places.view(shape.block_tokens, shape.width)


def _offsets(view: torch.Tensor) -> torch.Tensor:
    """Return the place in the storage of each element of a view, in elements."""
    offsets = torch.tensor(view.storage_offset())
    for size, stride in zip(view.shape, view.stride(), strict=True):
        offsets = offsets[..., None] + torch.arange(size) * stride
    return offsets


def _strides(layer: Any, places: dict[int, torch.Tensor], heads: int) -> Strides:
    """Return the strides that explain all places.

    Args:
        layer: the layer.
        places: ``[block_tokens, heads * dim]`` by block.
        heads: number of heads.
    """
    at = {block: each.reshape(len(each), heads, -1) for block, each in places.items()}
    (first, one), (second, two) = list(at.items())[:2]

    def step(axis: int) -> int:
        if one.shape[axis] < 2:
            return 0
        here, there = one.select(axis, 0).flatten()[0], one.select(axis, 1).flatten()[0]
        return int(there - here)

    block = int(two[0, 0, 0] - one[0, 0, 0]) // (second - first)
    strides = Strides(int(one[0, 0, 0]) - first * block, block, step(0), step(1), step(2))
    token, head, dim = (torch.arange(size) for size in one.shape)
    within = (
        (token * strides.token)[:, None, None]
        + (head * strides.head)[:, None]
        + dim * strides.dim
        + strides.offset
    )
    if any(not torch.equal(each, within + number * block) for number, each in at.items()):
        raise UnsupportedLayoutError(f"KV rows that no strides describe ({_backend(layer)})")
    return strides
