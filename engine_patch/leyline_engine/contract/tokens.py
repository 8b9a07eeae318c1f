"""Sequences of token ids (and of the radix keys made of them): arrays, digests, comparison."""

from __future__ import annotations

import hmac
import sys
from array import array
from collections.abc import Iterable

import xxhash


def token_array(tokens: Iterable[int]) -> array[int]:
    """Return token ids as a signed 64-bit array, the radix key's own element type."""
    return tokens if isinstance(tokens, array) and tokens.typecode == "q" else array("q", tokens)


def token_digest(tokens: Iterable[int]) -> str:
    """Return the xxh3-64 over the ids as little-endian signed 64-bit integers, 16 hex digits."""
    data = token_array(tokens)
    if sys.byteorder == "big":
        data = array("q", data)
        data.byteswap()
    return xxhash.xxh3_64_hexdigest(memoryview(data).cast("B") if len(data) else b"")


def sealed_digest(digest: str, secret: str | None) -> str:
    """Return a digest as it leaves the process: HMAC-SHA256 under ``secret``, 16 hex digits.

    A reader can't test which text it may be of. Without a secret the digest is sent as it is.
    """
    if secret is None:
        return digest
    return hmac.new(secret.encode(), digest.encode(), "sha256").hexdigest()[:16]


def common_prefix(first: array[int], second: array[int], offset: int = 0) -> int:
    """Return how many elements of ``first[offset:]`` and ``second`` agree.

    Compares memory by halves.
    """
    low, high = 0, max(0, min(len(first) - offset, len(second)))
    while low < high:
        middle = (low + high + 1) // 2
        if first[offset + low : offset + middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
