"""Ways to find what a prompt shares with sequences whose KV exists, behind one interface.

The arms only count: nothing is evicted, and nothing is copied. All get whole sequences, and are
given the length of the part that an exact prefix serves anyway.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from leyline_engine.reuse.agreement import agreement
from leyline_engine.reuse.chunking import (
    Chunk,
    ChunkRule,
    chunks,
    sub_windows,
    token_values,
)

from .verbatim_runs import MIN_RUN, GrowingRuns, Mask


class Arm(Protocol):
    """One way to find reusable tokens."""

    def remember(self, tokens: array[int], known: int) -> None:
        """Learn a sequence whose KV exists now.

        Args:
            tokens: token ids.
            known: number of its first tokens that a sequence learnt before begins with as well.
        """

    def served(self, tokens: array[int], known: int) -> Mask:
        """Return which tokens of a prompt can be reused.

        Args:
            tokens: token ids.
            known: number of its first tokens that an exact prefix serves. The answer for them has
                no meaning.
        """


class FixedBlocks:
    """Blocks at multiples of their width in both sequences, equal in content."""

    def __init__(self, width: int = 64) -> None:
        self._width = width
        self._blocks: set[bytes] = set()

    def remember(self, tokens: array[int], known: int) -> None:
        """Learn the blocks that aren't in the known prefix."""
        self._blocks.update(content for _, content in self._cut(tokens, known))

    def served(self, tokens: array[int], known: int) -> Mask:
        """Return the tokens of known blocks."""
        mask = np.zeros(len(tokens), dtype=np.bool_)
        for start, content in self._cut(tokens, known):
            mask[start : start + self._width] = content in self._blocks
        return mask

    def _cut(self, tokens: array[int], known: int) -> Iterator[tuple[int, bytes]]:
        first = known // self._width * self._width
        for start in range(first, len(tokens) - self._width + 1, self._width):
            yield start, tokens[start : start + self._width].tobytes()


class ContentChunks:
    """Chunks whose boundaries follow from the content; equal digests count as equal content."""

    def __init__(self, rule: ChunkRule | None = None, *, fallback: bool = False) -> None:
        self._rule = rule or ChunkRule()
        self._fallback = fallback
        self._digests: set[int] = set()

    def remember(self, tokens: array[int], known: int) -> None:
        """Learn the chunks, and with the fallback their windows."""
        for chunk in self._cut(tokens, known):
            self._digests.add(chunk.digest)
            self._digests.update(window.digest for window in self._windows(tokens, chunk))

    def served(self, tokens: array[int], known: int) -> Mask:
        """Return the tokens of known chunks, and with the fallback of windows in unknown ones."""
        mask = np.zeros(len(tokens), dtype=np.bool_)
        for chunk in self._cut(tokens, known):
            whole = self._known(chunk)
            for part in [chunk] if whole else self._windows(tokens, chunk):
                mask[part.start : part.end] = whole or self._known(part)
        return mask

    def _cut(self, tokens: array[int], known: int) -> Iterator[Chunk]:
        return (chunk for chunk in chunks(tokens, self._rule) if chunk.end > known)

    def _windows(self, tokens: array[int], chunk: Chunk) -> Sequence[Chunk]:
        return sub_windows(tokens, chunk) if self._fallback else ()

    def _known(self, chunk: Chunk) -> bool:
        return len(chunk) >= self._rule.least and chunk.digest in self._digests


class AlignedRuns:
    """Runs at multiples of their width in the source, found at any offset of a prompt.

    This is the rule of LMCache's matcher for blending, except that a stored run may be used more
    than once in a prompt.
    """

    _BASE = 0x9E3779B97F4A7C15

    def __init__(self, width: int = 256) -> None:
        if width & (width - 1):
            raise ValueError(f"width: {width} is not a power of two")
        self._width = width
        self._runs: dict[int, bytes] = {}

    def remember(self, tokens: array[int], known: int) -> None:
        """Learn the aligned runs that aren't in the known prefix."""
        first = known // self._width * self._width
        rolled = self._rolled(tokens[first:])
        for offset in range(0, len(rolled), self._width):
            self._runs[int(rolled[offset])] = self._content(tokens, first + offset)

    def served(self, tokens: array[int], known: int) -> Mask:
        """Return the tokens of known runs, which may overlap."""
        mask = np.zeros(len(tokens), dtype=np.bool_)
        first = max(0, known - self._width + 1)
        for start, value in enumerate(self._rolled(tokens[first:]).tolist(), first):
            if (run := self._runs.get(value)) and run == self._content(tokens, start):
                mask[start : start + self._width] = True
        return mask

    def _content(self, tokens: array[int], start: int) -> bytes:
        return tokens[start : start + self._width].tobytes()

    def _rolled(self, tokens: array[int]) -> NDArray[np.uint64]:
        """Return a polynomial hash of the run that begins at each position."""
        if len(tokens) < self._width:
            return np.empty(0, dtype=np.uint64)
        rolled, width = token_values(np.frombuffer(tokens, dtype=np.int64)), 1
        while width < self._width:
            factor = np.uint64(pow(self._BASE, width, 2**64))
            rolled, width = rolled[:-width] * factor + rolled[width:], 2 * width
        return rolled


class Prints(Protocol):
    """Some of a sequence's k-gram hashes, with the positions where the k-grams begin."""

    @property
    def positions(self) -> Sequence[int] | NDArray[np.int64]:
        """Ascending positions."""

    @property
    def values(self) -> Sequence[int] | NDArray[np.uint64]:
        """The hash at each position."""


class Winnowed:
    """Winnowed fingerprints; each hit is extended to both sides as far as the ids are equal.

    Only runs of at least ``MIN_RUN`` tokens count, which winnowing is certain to find.
    """

    def __init__(self, winnow: Callable[[array[int]], Prints], candidates: int = 8) -> None:
        """Start without sequences.

        Args:
            winnow: the fingerprints of a sequence.
            candidates: the number of places, latest first, that are compared per fingerprint.
        """
        self._winnow = winnow
        self._candidates = candidates
        self._places: defaultdict[int, list[tuple[NDArray[np.int64], int]]] = defaultdict(list)

    def remember(self, tokens: array[int], known: int) -> None:
        """Learn the fingerprints that aren't in the known prefix."""
        ids = np.frombuffer(tokens, dtype=np.int64)
        for position, value in self._prints(tokens, known):
            places = self._places[value]
            places.append((ids, position))
            del places[: -self._candidates]

    def served(self, tokens: array[int], known: int) -> Mask:
        """Return the tokens of runs that are equal in a sequence."""
        ids = np.frombuffer(tokens, dtype=np.int64)
        mask = np.zeros(len(tokens), dtype=np.bool_)
        compared: dict[tuple[int, int], int] = {}  # ends of runs, by source and distance
        for position, value in self._prints(tokens, known):
            for others, there in self._places.get(value, ()):
                line = id(others), there - position
                if position < compared.get(line, 0):
                    continue
                start, end = equal_run(ids, position, others, there)
                compared[line] = end
                if end - start >= MIN_RUN:
                    mask[start:end] = True
        return mask

    def _prints(self, tokens: array[int], known: int) -> Iterator[tuple[int, int]]:
        first = max(0, known - MIN_RUN + 1)
        prints = self._winnow(tokens[first:])
        for position, value in zip(prints.positions, prints.values, strict=True):
            yield first + int(position), int(value)


def equal_run(
    ids: NDArray[np.int64], at: int, others: NDArray[np.int64], there: int
) -> tuple[int, int]:
    """Return the run around ``ids[at]`` that is equal around ``others[there]``; maybe empty."""
    right = agreement(ids[at:], others[there:])
    left = agreement(ids[:at][::-1], others[:there][::-1])
    return (at - left, at + right) if right else (at, at)


class Ceiling:
    """All runs of at least ``MIN_RUN`` tokens that occur in any sequence."""

    def __init__(self) -> None:
        self._runs = GrowingRuns(MIN_RUN)

    def remember(self, tokens: array[int], known: int) -> None:
        """Learn the windows that aren't in the known prefix."""
        self._runs.add(np.frombuffer(tokens, dtype=np.int64), known)

    def served(self, tokens: array[int], known: int) -> Mask:
        """Return the tokens of known runs."""
        first = max(0, known - MIN_RUN + 1)
        mask = np.zeros(len(tokens), dtype=np.bool_)
        mask[first:] = self._runs.covered(np.frombuffer(tokens, dtype=np.int64)[first:])
        return mask


def new_arms(specials: frozenset[int], winnow: Callable[[array[int]], Prints]) -> Mapping[str, Arm]:
    """Return all arms by name, without sequences.

    Args:
        specials: the tokens at which chunks begin, in the arm that knows of them.
        winnow: the fingerprints of a sequence.
    """
    return {
        "fixed blocks": FixedBlocks(),
        "aligned runs": AlignedRuns(),
        "chunks": ContentChunks(),
        "chunks, windows": ContentChunks(fallback=True),
        "chunks, windows, resets": ContentChunks(ChunkRule(resets=specials), fallback=True),
        "winnowing": Winnowed(winnow),
        "ceiling": Ceiling(),
    }
