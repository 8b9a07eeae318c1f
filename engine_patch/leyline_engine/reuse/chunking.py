"""Chunks of a token sequence whose boundaries follow from its content, with a digest each.

A Gear hash rolls over the last 64 tokens, and a chunk ends where it falls below a threshold. Equal
runs therefore have equal boundaries at any position, except near their beginning: there the window,
and the chunk that is open, still depend on the tokens before. A special token or a marker cuts that
dependence: a chunk begins there, and the hash begins again.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from ..contract import token_array

WINDOW = 64
"""Number of tokens that the rolling hash depends on: older ones are shifted out of 64 bits."""

SUB_WINDOW = 128
"""Length of the pieces that are looked up if a whole chunk isn't known."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens ``[start, end)`` of a sequence, and the xxh3-64 over their ids."""

    start: int
    end: int
    digest: int

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class ChunkRule:
    """Settings that decide where chunks end. Equal content is found only under equal rules.

    Raises:
        ValueError: a setting out of range; the message names it.
    """

    exponent: int = 7
    """The hash is below the threshold for one token of ``2**exponent``."""

    least: int = 32
    """Fewest tokens of a chunk; only the last one before a reset or the end may have fewer."""

    most: int = 512
    """Most tokens of a chunk."""

    resets: frozenset[int] = frozenset()
    """Special tokens. Each is the first of a chunk."""

    marker: tuple[int, ...] = ()
    """A sequence that the author of a prompt puts before what is shared. Chunks begin at its first
    token and after its last one. Empty: none."""

    seed: int = 0
    """Selects another random value for each token."""

    def __post_init__(self) -> None:
        if not 1 <= self.exponent < 64:
            raise ValueError(f"exponent: {self.exponent} is not in 1 to 63")
        if not 1 <= self.least <= self.most:
            raise ValueError(f"least: {self.least} is not in 1 to most, which is {self.most}")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed: {self.seed} is not an unsigned number of 64 bits")


def chunks(tokens: Sequence[int], rule: ChunkRule | None = None) -> tuple[Chunk, ...]:
    """Cut a sequence into chunks, which cover it without gaps, in order."""
    rule = rule or ChunkRule()
    data = token_array(tokens)
    if not data:
        return ()
    ids = np.frombuffer(data, dtype=np.int64)
    segments = _segment_starts(ids, rule)
    below = gear(ids, segments, rule.seed) < np.uint64(1 << (64 - rule.exponent))
    ends = _ends((np.flatnonzero(below) + 1).tolist(), [*segments[1:].tolist(), len(ids)], rule)
    return tuple(_digested(data, ends, start=0))


def sub_windows(tokens: Sequence[int], chunk: Chunk, width: int = SUB_WINDOW) -> tuple[Chunk, ...]:
    """Cut a chunk into windows of ``width`` tokens, the last one perhaps shorter.

    Chunks that begin alike share their first windows, even if one of them ends earlier.
    """
    ends = [*range(chunk.start + width, chunk.end, width), chunk.end]
    return tuple(_digested(token_array(tokens), ends, start=chunk.start))


def gear(ids: NDArray[np.int64], segments: NDArray[np.int64], seed: int = 0) -> NDArray[np.uint64]:
    """Return the rolling hash after each token: ``2 * before + value(token)``, modulo ``2**64``.

    The hash is linear, so that of a window is put together from those of its two halves, for all
    positions at once.

    Args:
        ids: token ids.
        segments: positions at which the hash begins again, ascending, the first of them 0.
        seed: selects the values of tokens.
    """
    begins = np.zeros(len(ids), dtype=np.int64)
    begins[segments] = segments
    age = np.arange(len(ids)) - np.maximum.accumulate(begins)
    rolled = token_values(ids, seed)
    width = 1
    while width < min(WINDOW, len(ids)):
        earlier = rolled[:-width] << np.uint64(width)
        earlier[age[width:] < width] = 0  # of another segment
        rolled[width:] += earlier
        width *= 2
    return rolled


def token_values(ids: NDArray[np.int64], seed: int = 0) -> NDArray[np.uint64]:
    """Return a random-looking number of 64 bits for each id (the finaliser of SplitMix64)."""
    mixed = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _segment_starts(ids: NDArray[np.int64], rule: ChunkRule) -> NDArray[np.int64]:
    """Return the positions at which chunk and hash begin regardless of the tokens before."""
    found = [np.zeros(1, dtype=np.int64)]
    if rule.resets:
        found.append(np.flatnonzero(np.isin(ids, list(rule.resets))))
    if rule.marker:
        at = _occurrences(ids, rule.marker)
        found += [at, at + len(rule.marker)]
    starts = np.unique(np.concatenate(found))
    return starts[starts < len(ids)]


def _occurrences(ids: NDArray[np.int64], marker: tuple[int, ...]) -> NDArray[np.int64]:
    at = np.flatnonzero(ids[: max(0, len(ids) - len(marker) + 1)] == marker[0])
    for offset, token in enumerate(marker):
        at = at[ids[at + offset] == token]
    return at


def _ends(candidates: list[int], segment_ends: list[int], rule: ChunkRule) -> Iterator[int]:
    """Yield the end of each chunk: the first candidate that the clamps allow."""
    start = place = 0
    for stop in segment_ends:
        while start < stop:
            place = bisect_left(candidates, start + rule.least, place)
            end = min(start + rule.most, stop)
            if place < len(candidates):
                end = min(end, candidates[place])
            start = end
            yield end


def _digested(data: array[int], ends: Iterator[int] | list[int], start: int) -> Iterator[Chunk]:
    words = memoryview(data)
    for end in ends:
        yield Chunk(start, end, xxhash.xxh3_64_intdigest(words[start:end].cast("B")))
        start = end
