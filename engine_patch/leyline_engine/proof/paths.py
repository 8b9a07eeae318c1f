"""Paths: what a row has read, as digests over all keys from the prompt's beginning to the row's.
Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

_SIZE = 16


class Paths:
    """Digests of key sequences under one key; equal paths have equal digests.

    Args:
        nonce: at most 64 bytes.
    """

    def __init__(self, nonce: bytes) -> None:
        self._root = blake2b(key=nonce, digest_size=_SIZE)

    def root(self) -> Any:
        """Return the state of the empty path, for :meth:`along`."""
        return self._root.copy()

    def along(self, state: Any, keys: Iterable[int]) -> list[bytes]:
        """Return the path's digest after each further key; ``state`` moves to the end."""
        found: list[bytes] = []
        for key in keys:
            state.update(key.to_bytes(8, "little"))
            found.append(state.digest())
        return found

    def of(self, keys: array[int]) -> list[bytes]:
        """Return the digest after each key of a path from the beginning."""
        return self.along(self.root(), keys)
