"""Fingerprints of token sequences by winnowing (Schleimer, Wilkerson and Aiken, SIGMOD 2003).

Of each ``window`` consecutive k-gram hashes the smallest is selected. Two sequences that share
``k + window - 1`` tokens share a whole window, and so the hash selected in it::

    tokens   t0 t1 ─────── k-gram ─────── t31 …                     k = 32
    hashes   h0 h1 h2 ───────── window ───────── h32 …              window = 33
    selected          └ the smallest of each window, about 2 of 34 tokens

A hash only proposes a place; whoever uses it compares the tokens.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

GRAM = 32
"""Tokens that one hash covers."""
WINDOW = 33
"""Number of consecutive hashes of which the smallest is selected."""
GUARANTEE = GRAM + WINDOW - 1
"""Length of a common run, in tokens, that certainly shares a fingerprint."""

_BASE = np.uint64(0x9E3779B97F4A7C15 | 1)
_POSITION_BITS = np.uint64(24)
_POSITIONS = np.uint64((1 << 24) - 1)
_LONGEST = 1 << 23
"""Hashes that are selected from at once: their positions have to fit beside the hash."""


class Fingerprints(NamedTuple):
    """Selected hashes of a sequence, in order of position."""

    positions: NDArray[np.int64]
    """``[n]``: first token of each k-gram."""
    values: NDArray[np.uint64]
    """``[n]``: the hashes."""


class Winnower:
    """Selects fingerprints; sequences of one winnower can be compared.

    Args:
        seed: kept secret, nobody can search for token sequences of equal hashes.
        gram: tokens that a hash covers.
        window: number of hashes of which one is selected.
    """

    def __init__(self, seed: int = 0, *, gram: int = GRAM, window: int = WINDOW) -> None:
        self._seed = np.uint64(seed & 0xFFFF_FFFF_FFFF_FFFF)
        self._gram = gram
        self._window = window
        self._powers = np.ones(1, dtype=np.uint64)
        self._inverses = np.ones(1, dtype=np.uint64)

    @property
    def guarantee(self) -> int:
        """Length of a common run that certainly shares a fingerprint."""
        return self._gram + self._window - 1

    def select(self, tokens: array[int], start: int = 0, end: int | None = None) -> Fingerprints:
        """Return the fingerprints of the windows that lie in ``tokens[start:end]``.

        Args:
            tokens: int64 ids.
            start: for a sequence whose first n tokens were done before, ``n - guarantee + 1``.

        Returns:
            Fingerprints with positions in ``tokens``.
        """
        view = np.frombuffer(tokens, dtype=np.int64)[start:end]
        parts = [
            self._select(view[at : at + _LONGEST + self.guarantee], start + at)
            for at in range(0, max(1, len(view)), _LONGEST)
        ]
        if len(parts) == 1:
            return parts[0]
        positions = np.concatenate([part.positions for part in parts])
        values = np.concatenate([part.values for part in parts])
        _, first = np.unique(positions, return_index=True)
        return Fingerprints(positions[first], values[first])

    def _select(self, tokens: NDArray[np.int64], offset: int) -> Fingerprints:
        hashes = self._hashes(tokens)
        if len(hashes) < self._window:
            return Fingerprints(np.empty(0, np.int64), np.empty(0, np.uint64))
        at = np.arange(len(hashes), dtype=np.uint64)
        # The position below the hash: of equal hashes, the minimum is the leftmost.
        packed = (hashes & ~_POSITIONS) | at
        smallest = _sliding_minimum(packed, self._window)
        chosen = (smallest & _POSITIONS).astype(np.int64)
        selected = chosen[np.append(True, chosen[1:] != chosen[:-1])]
        return Fingerprints(selected + offset, hashes[selected])

    def _hashes(self, tokens: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return the hash of each k-gram: polynomials modulo 2**64 over mixed ids, mixed again."""
        count = len(tokens) - self._gram + 1
        if count <= 0:
            return np.empty(0, np.uint64)
        self._grow(len(tokens))
        terms = _mixed(tokens.astype(np.uint64) ^ self._seed) * self._inverses[: len(tokens)]
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(terms, dtype=np.uint64)])
        return _mixed((sums[self._gram :] - sums[: -self._gram]) * self._powers[:count])

    def _grow(self, length: int) -> None:
        """Extend the tables of powers of the base, and of its inverse."""
        if len(self._powers) >= length:
            return
        size = max(length, 2 * len(self._powers))
        for name, base in (("_powers", int(_BASE)), ("_inverses", pow(int(_BASE), -1, 1 << 64))):
            factors = np.full(size, base, dtype=np.uint64)
            factors[0] = 1
            setattr(self, name, np.cumprod(factors, dtype=np.uint64))


def ends_of_chains(prints: Fingerprints, window: int = WINDOW) -> Fingerprints:
    """Return fingerprints with only the ends of chains of equal neighbours.

    Periodic text, such as one token repeated, selects the same hash again and again. The ends of
    such a chain are enough to find the text, and keep an index of it small.
    """
    positions, values = prints
    if len(positions) < 3:
        return prints
    near = (np.diff(positions) <= window) & (values[1:] == values[:-1])
    inner = np.zeros(len(positions), dtype=np.bool_)
    inner[1:-1] = near[1:] & near[:-1]
    return Fingerprints(positions[~inner], values[~inner])


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return each value mixed: the finalizer of splitmix64 (Steele, Lea and Flood, 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _sliding_minimum(values: NDArray[np.uint64], window: int) -> NDArray[np.uint64]:
    """Return the minimum of each window, by doubling: ``[n - window + 1]``."""
    width = 1
    while 2 * width <= window:
        values = np.minimum(values[:-width], values[width:])
        width *= 2
    rest = window - width
    return np.minimum(values[:-rest], values[rest:]) if rest else values
