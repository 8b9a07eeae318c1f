"""Paths: what a row has read, as digests over all keys from the prompt's beginning to the row's.
Pure.

Keys are hashed by multiply-shift as rows are, see :mod:`~leyline_engine.proof.digests`, with two
secret factors per position, so that a path's digests are sums that go on from the path before it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SECRET_BYTES = 16

_HASHES = 4
_LOW = np.uint64(0x7FFF_FFFF)
_HIGH_SHIFT, _SHIFT = np.uint64(31), np.uint64(32)
_AT_ONCE = 1 << 14

Sums = NDArray[np.uint64]


@dataclass(slots=True)
class PathState:
    """A place on a path: its position, and the sums up to it."""

    position: int
    sums: Sums

    def copy(self) -> PathState:
        """Return a state that moves on its own."""
        return PathState(self.position, self.sums)


class Paths:
    """Digests of key sequences under one secret; equal paths have equal digests.

    Args:
        secret: :data:`SECRET_BYTES` bytes.
    """

    def __init__(self, secret: bytes) -> None:
        self._key = int.from_bytes(secret, "little")

    def root(self) -> PathState:
        """Return the state of the empty path, for :meth:`along`."""
        return PathState(0, np.zeros(_HASHES, dtype=np.uint64))

    def along(self, state: PathState, keys: array[int]) -> list[bytes]:
        """Return the path's digest after each further key; ``state`` moves to the end."""
        found: list[bytes] = []
        for sums in self._sums(state, keys):
            raw = (sums >> _SHIFT).astype("<u4").tobytes()
            size = 4 * _HASHES
            found += [raw[at : at + size] for at in range(0, len(raw), size)]
        return found

    def of(self, keys: array[int]) -> list[bytes]:
        """Return the digest after each key of a path from the beginning."""
        return self.along(self.root(), keys)

    def heads(self, keys: array[int], state: PathState | None = None) -> Sums:
        """Return the first eight bytes of each digest of :meth:`along`, as :func:`head` does.

        Args:
            state: place on the path that the keys continue; it moves to the end.
        """
        found = [
            (sums[:, 0] >> _SHIFT) | (sums[:, 1] >> _SHIFT << _SHIFT)
            for sums in self._sums(self.root() if state is None else state, keys)
        ]
        return np.concatenate(found) if found else np.empty(0, dtype=np.uint64)

    def _sums(self, state: PathState, keys: array[int]) -> Iterator[Sums]:
        """Yield ``[n, hashes]`` sums in portions; ``state`` moves along."""
        every = np.frombuffer(keys or b"", dtype=np.int64).astype(np.uint64)
        for start in range(0, len(keys), _AT_ONCE):
            some = every[start : start + _AT_ONCE]
            # Two outputs of the generator, of four words each, per position.
            drawn = np.random.Philox(key=self._key, counter=2 * state.position)
            factors = drawn.random_raw(2 * _HASHES * len(some)).reshape(len(some), 2, _HASHES)
            # A lane that is never zero keeps paths of different lengths apart.
            lanes = np.stack([(some & _LOW) + np.uint64(1), some >> _HIGH_SHIFT], axis=1)
            sums = np.cumsum((factors * lanes[:, :, None]).sum(1, dtype=np.uint64), axis=0)
            sums += state.sums
            state.position, state.sums = state.position + len(some), sums[-1]
            yield sums


def head(path: bytes) -> int:
    """Return the first eight bytes of a digest as a number."""
    return int.from_bytes(path[:8], "little")
