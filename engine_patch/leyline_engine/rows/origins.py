"""The size of the ring of as-computed keys beside a KV pool, in tokens and bytes."""

from __future__ import annotations

import os
from collections.abc import Mapping

from leyline_engine.rows.mover import PoolTensors

ORIGIN_BYTES_VARIABLE = "LEYLINE_ORIGIN_BYTES"
"""Maximum number of bytes of as-computed keys kept on each device, outside the engine's pool."""
DEFAULT_ORIGIN_BYTES = 1 << 30
SLOTS_PER_ORIGIN = 8
"""The ring has at most a key for each so many slots."""
MIN_PACKED_ORIGINS = 8192
"""Keys that a pool of 8 bits needs, if it has as many slots: what gives way is prefilled, so the
ring holds an edited turn of some length."""


class OriginsError(Exception):
    """The as-computed keys that a pool needs take more bytes than they may."""


def origin_bytes_from(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the bytes that an operator allows; None if they are left to Leyline.

    Raises:
        ValueError: no number of bytes.
    """
    text = environment.get(ORIGIN_BYTES_VARIABLE)
    if not text:
        return None
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"{ORIGIN_BYTES_VARIABLE} is a number of bytes, not {text!r}")
    return int(text)


def bytes_per_origin(tensors: PoolTensors) -> int:
    """Return the bytes of one as-computed key, over all layers."""
    keys = tensors.keys[0]
    return len(tensors.keys) * int(keys.shape[1]) * tensors.rotary_dim * keys.element_size()


def origin_rows(tensors: PoolTensors, allowed: int | None = None) -> int:
    """Return the number of as-computed keys to keep beside a pool, at least 1.

    Args:
        tensors: the pool.
        allowed: bytes that they may take. By default ``DEFAULT_ORIGIN_BYTES``, or as many as a pool
            of 8 bits needs.

    Raises:
        OriginsError: a pool of 8 bits needs more.
    """
    each = bytes_per_origin(tensors)
    least = 1 if tensors.packed is None else max(1, min(MIN_PACKED_ORIGINS, tensors.capacity))
    wanted = max(least, tensors.capacity // SLOTS_PER_ORIGIN)
    if allowed is None:
        allowed = max(DEFAULT_ORIGIN_BYTES, least * each)
    if tensors.packed is not None and allowed < least * each:
        raise OriginsError(
            f"8-bit KV needs {least * each} bytes for as-computed keys, "
            f"{ORIGIN_BYTES_VARIABLE} allows {allowed}"
        )
    return max(1, min(wanted, allowed // each))
