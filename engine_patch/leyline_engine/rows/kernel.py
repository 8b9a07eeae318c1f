"""The GPU's mover of rows of a KV pool: one launch for all layers.

Angles come from torch, for each distinct rotation of the layers, so that both movers turn by the
same fp32 cosines and sines. Without fused multiply-add the kernel's fp32 arithmetic is torch's as
well.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from leyline_engine.rotary.rotation import ModelRotary, Pairing
from leyline_engine.rows.mover import Move, PoolTensors
from leyline_engine.rows.paging import Paging

_TOKENS = 8
"""Rows per program."""
_COPY = 512
"""Maximum number of a row's elements that a program copies per step."""
_ELEMENTS = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.uint8: tl.uint8,
}


@triton.jit
def _decode(x, PACKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return stored elements as fp32; packed ones are the bytes of e4m3 numbers.

    By bits: Triton converts e4m3 on GPUs from Ada on only.
    """
    if PACKED:
        bits = x.to(tl.int32)
        size = bits & 0x7F
        small = (size.to(tl.float32) * 0.001953125).to(tl.int32, bitcast=True)
        number = tl.where(size < 8, small, (size << 20) + (120 << 23))
        number = tl.where(size == 0x7F, 0x7FC00000, number)
        result = (number | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True)
    else:
        result = x.to(tl.float32)
    return result


@triton.jit
def _encode(x, ELEMENT: tl.constexpr, PACKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return fp32 numbers as they are stored: to nearest even, e4m3 clamped at ±448."""
    if PACKED:
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        clamped = tl.minimum(size, 0x43E00000)  # 448
        normal = ((clamped + 0x7FFFF + ((clamped >> 20) & 1)) >> 20) - (120 << 3)
        # Steps below 2^-6 are those of fp32 at 2^14.
        shifted = (clamped.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True)
        rounded = tl.where(clamped < 0x3C800000, shifted - 0x46800000, normal)
        rounded = tl.where(size > 0x7F800000, 0x7F, rounded)
        result = (rounded | ((bits >> 24) & 0x80)).to(tl.uint8)
    else:
        result = x.to(ELEMENT)
    return result


@triton.jit
def _turned(x, y, c, s, ELEMENT: tl.constexpr, PACKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return stored pairs ``(x, y)``, turned; of packed ones, those that stay keep their bits."""
    first = _decode(x, PACKED)
    second = _decode(y, PACKED)
    u = _encode(first * c - second * s, ELEMENT, PACKED)
    v = _encode(second * c + first * s, ELEMENT, PACKED)
    if PACKED:
        stays = (c == 1.0) & (s == 0.0)
        u = tl.where(stays, x, u)
        v = tl.where(stays, y, v)
    return u, v


@triton.jit
def _begin(slot, BLOCK: tl.constexpr, PITCH: tl.constexpr, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the distance of slots' rows from the first: blocks are PITCH apart, slots STEP."""
    return slot // BLOCK * PITCH + slot % BLOCK * STEP if BLOCK > 1 else slot * PITCH


@triton.jit
def _move_rows(  # type: ignore[no-untyped-def]
    key_pointers,
    value_pointers,
    as_computed,
    source,
    target,
    origin,
    claimed,
    rotations,
    cos,
    sin,
    count,
    origins,
    ELEMENT: tl.constexpr,
    PACKED: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    KEY_PITCH: tl.constexpr,
    KEY_STEP: tl.constexpr,
    KEY_HEAD: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    VALUE_PITCH: tl.constexpr,
    VALUE_STEP: tl.constexpr,
    VALUE_HEAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BAND: tl.constexpr,
    HALF: tl.constexpr,
    STEP: tl.constexpr,
    GAP: tl.constexpr,
    PLAIN: tl.constexpr,
    PLAIN_LENGTH: tl.constexpr,
    PAIRS: tl.constexpr,
    COPY: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Program (tile of rows, layer, head): copy what stays, turn the band, keep it if claimed.

    Pair p of the band is its elements ``p·STEP`` and ``p·STEP + GAP``. A pool's strides are
    constants: it has the same in all layers.
    """
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    layer = tl.program_id(1)
    head = tl.program_id(2)
    live = row < count
    held = tl.load(source + row, mask=live, other=0)
    wanted = tl.load(target + row, mask=live, other=0)
    keys = tl.load(key_pointers + layer).to(tl.pointer_type(ELEMENT)) + head * KEY_HEAD
    key_from = keys + _begin(held, KEY_BLOCK, KEY_PITCH, KEY_STEP)[:, None]
    key_to = keys + _begin(wanted, KEY_BLOCK, KEY_PITCH, KEY_STEP)[:, None]

    for begin in range(0, PLAIN_LENGTH, COPY):
        at = begin + tl.arange(0, COPY)
        here = live[:, None] & (at < PLAIN_LENGTH)[None, :]
        plain = ((PLAIN + at) * KEY_DIM)[None, :]
        tl.store(key_to + plain, tl.load(key_from + plain, mask=here), mask=here)
    if VALUE > 0:
        values = tl.load(value_pointers + layer).to(tl.pointer_type(ELEMENT)) + head * VALUE_HEAD
        value_from = values + _begin(held, VALUE_BLOCK, VALUE_PITCH, VALUE_STEP)[:, None]
        value_to = values + _begin(wanted, VALUE_BLOCK, VALUE_PITCH, VALUE_STEP)[:, None]
        for begin in range(0, VALUE, COPY):
            at = begin + tl.arange(0, COPY)
            here = live[:, None] & (at < VALUE)[None, :]
            place = (at * VALUE_DIM)[None, :]
            tl.store(value_to + place, tl.load(value_from + place, mask=here), mask=here)

    pair = tl.arange(0, PAIRS)
    turning = live[:, None] & (pair < HALF)[None, :]
    first = (pair * STEP)[None, :]
    second = first + GAP
    turn = tl.load(rotations + layer) * count + row
    angle = turn[:, None] * HALF + pair[None, :]
    c = tl.load(cos + angle, mask=turning, other=0.0)
    s = tl.load(sin + angle, mask=turning, other=0.0)
    back = tl.load(origin + row, mask=live, other=-1)
    taken = tl.load(claimed + row, mask=live, other=-1)
    returning = turning & (back >= 0)[:, None]
    own = turning & (back < 0)[:, None]
    claiming = turning & (taken >= 0)[:, None]
    ring = as_computed + layer.to(tl.int64) * origins * HEADS * 2 * HALF + head * 2 * HALF
    back_from = ring + back[:, None] * HEADS * 2 * HALF
    taken_to = ring + taken[:, None] * HEADS * 2 * HALF
    # The masks exclude each other: each element comes from one of the two.
    x = tl.load(key_from + (BAND + first) * KEY_DIM, mask=own, other=0)
    y = tl.load(key_from + (BAND + second) * KEY_DIM, mask=own, other=0)
    x = tl.where(returning, tl.load(back_from + first, mask=returning, other=0), x)
    y = tl.where(returning, tl.load(back_from + second, mask=returning, other=0), y)
    tl.store(taken_to + first, x, mask=claiming)
    tl.store(taken_to + second, y, mask=claiming)
    u, v = _turned(x, y, c, s, ELEMENT, PACKED)
    tl.store(key_to + (BAND + first) * KEY_DIM, u, mask=turning)
    tl.store(key_to + (BAND + second) * KEY_DIM, v, mask=turning)


@triton.jit
def _refute_rows(  # type: ignore[no-untyped-def]
    key_pointers,
    as_computed,
    slots,
    origin,
    rotations,
    cos,
    sin,
    certified,
    count,
    origins,
    ELEMENT: tl.constexpr,
    PACKED: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    KEY_PITCH: tl.constexpr,
    KEY_STEP: tl.constexpr,
    KEY_HEAD: tl.constexpr,
    KEY_DIM: tl.constexpr,
    BAND: tl.constexpr,
    HALF: tl.constexpr,
    STEP: tl.constexpr,
    GAP: tl.constexpr,
    PAIRS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Program (tile of rows, layer, head): clear ``certified`` where turned origin ≠ slot."""
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    layer = tl.program_id(1)
    head = tl.program_id(2)
    live = row < count
    held = tl.load(slots + row, mask=live, other=0)
    back = tl.load(origin + row, mask=live, other=-1)
    pair = tl.arange(0, PAIRS)
    turning = (live & (back >= 0))[:, None] & (pair < HALF)[None, :]
    first = (pair * STEP)[None, :]
    second = first + GAP
    turn = tl.load(rotations + layer) * count + row
    angle = turn[:, None] * HALF + pair[None, :]
    c = tl.load(cos + angle, mask=turning, other=0.0)
    s = tl.load(sin + angle, mask=turning, other=0.0)
    ring = as_computed + layer.to(tl.int64) * origins * HEADS * 2 * HALF + head * 2 * HALF
    back_from = ring + back[:, None] * HEADS * 2 * HALF
    keys = tl.load(key_pointers + layer).to(tl.pointer_type(ELEMENT)) + head * KEY_HEAD
    key_at = keys + _begin(held, KEY_BLOCK, KEY_PITCH, KEY_STEP)[:, None]
    x = tl.load(back_from + first, mask=turning, other=0)
    y = tl.load(back_from + second, mask=turning, other=0)
    held_u = tl.load(key_at + (BAND + first) * KEY_DIM, mask=turning, other=0)
    held_v = tl.load(key_at + (BAND + second) * KEY_DIM, mask=turning, other=0)
    u, v = _turned(x, y, c, s, ELEMENT, PACKED)
    same_u = u.to(tl.float32) == held_u.to(tl.float32)
    same_v = v.to(tl.float32) == held_v.to(tl.float32)
    refuted = turning & ((same_u & same_v) == 0)
    # Programs that disagree with the entry all write the same value.
    where = certified + row[:, None] + 0 * pair[None, :]
    tl.store(where, 0, mask=refuted)


def _strides(name: str, rows: torch.Tensor, paging: Paging | None) -> dict[str, int]:
    """Return a tensor's strides, in elements, as constants of the kernels."""
    row, head, dim = rows.stride()
    block, pitch, step = (1, 1, 0) if paging is None else (paging.block, paging.pitch, paging.step)
    return {
        f"{name}_BLOCK": block,
        f"{name}_PITCH": pitch * row,
        f"{name}_STEP": step * row,
        f"{name}_HEAD": head,
        f"{name}_DIM": dim,
    }


class TritonMover:
    """The mover for GPUs; Triton's interpreter runs it anywhere."""

    def __init__(self, tensors: PoolTensors, rotary: ModelRotary) -> None:
        self._rotary = rotary
        self._tensors = tensors
        keys = tensors.keys
        values = tensors.values
        half = rotary.dim // 2
        interleaved = rotary.pairing is Pairing.INTERLEAVED
        heads, key = keys[0].shape[1:]
        # The band is at one end of a key, so the rest is one stretch.
        self._plain = (
            (0, tensors.rotary_start) if tensors.rotary_start else (rotary.dim, key - rotary.dim)
        )
        if sum(self._plain) != (tensors.rotary_start or key):
            raise ValueError("the rotary band lies at neither end of the key")
        self._key_pointers = self._pointers(keys)
        self._value_pointers = self._pointers(values or keys)
        self._rotations = torch.tensor(
            [rotary.index(layer) for layer in range(len(keys))],
            dtype=torch.int32,
            device=tensors.device,
        )
        self._value = values[0].shape[-1] if values else 0
        self._value_strides = _strides("VALUE", (values or keys)[0], tensors.value_paging)
        self._shape: dict[str, Any] = {
            "ELEMENT": _ELEMENTS[tensors.stored],
            "PACKED": tensors.packed is not None,
            "HEADS": heads,
            **_strides("KEY", keys[0], tensors.key_paging),
            "BAND": tensors.rotary_start,
            "HALF": half,
            "STEP": 2 if interleaved else 1,
            "GAP": 1 if interleaved else half,
            "PAIRS": triton.next_power_of_2(half),
            "TOKENS": _TOKENS,
            "enable_fp_fusion": False,
        }

    def _pointers(self, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        addresses = [tensor.data_ptr() for tensor in tensors]
        return torch.tensor(addresses, dtype=torch.int64, device=self._tensors.device)

    def _grid(self, count: int) -> tuple[int, int, int]:
        keys = self._tensors.keys
        return triton.cdiv(count, _TOKENS), len(keys), int(keys[0].shape[1])

    def _turns(
        self, computed_at: torch.Tensor, needed_at: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines, fp32 ``[distinct rotations, T, d/2]``."""
        turns = [rotary.turns(computed_at, needed_at) for rotary in self._rotary.distinct]
        cos, sin = zip(*turns, strict=True)
        return torch.stack(cos), torch.stack(sin)

    def move(self, move: Move, as_computed: torch.Tensor) -> None:
        """Move rows; see :meth:`~leyline_engine.rows.mover.RowMover.move`."""
        count = len(move.source)
        cos, sin = self._turns(move.computed_at, move.needed_at)
        plain, length = self._plain
        longest = max(length, self._value, 1)
        _move_rows[self._grid(count)](
            self._key_pointers,
            self._value_pointers,
            as_computed,
            move.source,
            move.target,
            move.origin,
            move.claimed,
            self._rotations,
            cos,
            sin,
            count,
            as_computed.shape[1],
            VALUE=self._value,
            **self._value_strides,
            PLAIN=plain,
            PLAIN_LENGTH=length,
            COPY=min(_COPY, triton.next_power_of_2(longest)),
            **self._shape,
        )

    def certify(
        self,
        slots: torch.Tensor,
        origin: torch.Tensor,
        computed_at: torch.Tensor,
        stands_at: torch.Tensor,
        as_computed: torch.Tensor,
    ) -> torch.Tensor:
        """Certify rows; see :meth:`~leyline_engine.rows.mover.RowMover.certify`."""
        certified = (origin >= 0).to(torch.int32)
        count = len(slots)
        if count == 0:
            return certified.bool()
        cos, sin = self._turns(computed_at, stands_at)
        _refute_rows[self._grid(count)](
            self._key_pointers,
            as_computed,
            slots,
            origin,
            self._rotations,
            cos,
            sin,
            certified,
            count,
            as_computed.shape[1],
            **self._shape,
        )
        return certified.bool()
