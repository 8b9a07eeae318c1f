"""Digests over token ids, equal on both sides of the wire."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

import xxhash


def token_array(tokens: Iterable[int]) -> array[int]:
    """Token ids as a signed 64-bit array, the radix key's own element type."""
    return tokens if isinstance(tokens, array) and tokens.typecode == "q" else array("q", tokens)


def token_digest(tokens: Iterable[int]) -> str:
    """xxh3-64 over the ids as little-endian signed 64-bit integers, 16 hex digits."""
    data = token_array(tokens)
    if sys.byteorder == "big":
        data = array("q", data)
        data.byteswap()
    return xxhash.xxh3_64_hexdigest(memoryview(data).cast("B") if len(data) else b"")
