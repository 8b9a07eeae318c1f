"""Sequences of token ids (and of the radix keys made of them): arrays, digests, comparison."""

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


def common_prefix(first: array[int], second: array[int], offset: int = 0) -> int:
    """How many elements of ``first[offset:]`` and ``second`` agree; compares memory by halves."""
    low, high = 0, max(0, min(len(first) - offset, len(second)))
    while low < high:
        middle = (low + high + 1) // 2
        if first[offset + low : offset + middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
