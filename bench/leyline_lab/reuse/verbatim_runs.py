"""The most that any reuse of verbatim runs could find: an independent ceiling.

A token is covered if it lies in a run of at least ``min_run`` tokens that some live sequence holds
verbatim. Every such run is a union of windows of exactly ``min_run`` tokens, so that it suffices to
know which windows occur. They are found as in a suffix array by prefix doubling that stops at this
depth: windows of one token are numbered, then those of two by the numbers of their halves, and so
forth. Equal numbers mean equal ids: no hash takes part, nor any code of ``leyline_engine.reuse``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]
Mask = NDArray[np.bool_]

MIN_RUN = 64
_SEPARATOR = -1
_ABSENT = -1


def token_ids(tokens: Sequence[int] | Tokens) -> Tokens:
    """Return token ids as an array.

    Raises:
        ValueError: an id is negative.
    """
    ids = np.asarray(tokens, dtype=np.int64)
    if len(ids) and ids.min() < 0:
        raise ValueError("a token id is negative")
    return ids


def covered(
    live: Iterable[Sequence[int] | Tokens], prompt: Sequence[int] | Tokens, min_run: int = MIN_RUN
) -> Mask:
    """Return which tokens of ``prompt`` lie in a run that occurs in one of the ``live`` sequences.

    Raises:
        ValueError: ``min_run`` is not positive, or a token id is negative.
    """
    return Windows(live, min_run).covered(prompt)


class Windows:
    """All windows of ``min_run`` tokens that occur in some sequences.

    Takes ``O(n log n log(min_run))`` time for ``n`` tokens, and up to ``8 n log2(min_run)`` bytes.

    Raises:
        ValueError: ``min_run`` is not positive, or a token id is negative.
    """

    def __init__(self, live: Iterable[Sequence[int] | Tokens], min_run: int = MIN_RUN) -> None:
        if min_run < 1:
            raise ValueError(f"min_run: {min_run} is not positive")
        self.min_run = min_run
        joined: list[Tokens] = []
        for sequence in live:
            joined += [token_ids(sequence), np.array([_SEPARATOR])]
        text = np.concatenate(joined) if joined else np.empty(0, dtype=np.int64)
        self.tokens = len(text)
        self._levels: list[Tokens] = []
        self._number(text, extend=True)

    def covered(self, prompt: Sequence[int] | Tokens) -> Mask:
        """Return which tokens of ``prompt`` lie in a run that occurs in one of the sequences."""
        ids = token_ids(prompt)
        found = self._number(ids, extend=False) != _ABSENT
        edges = np.zeros(len(ids) + 1, dtype=np.int64)
        edges[: len(found)] += found
        edges[self.min_run : self.min_run + len(found)] -= found
        return np.cumsum(edges[: len(ids)]) > 0

    def _number(self, ids: Tokens, *, extend: bool) -> Tokens:
        """Return the number of the window that begins at each position; _ABSENT if it is unknown.

        Args:
            ids: any sequence.
            extend: learn the windows of this sequence instead of looking them up.
        """
        numbers, width, level = self._named(ids, 0, extend=extend), 1, 1
        while width < self.min_run:
            step = min(width, self.min_run - width)  # the two halves may overlap
            left, right = numbers[: max(0, len(numbers) - step)], numbers[step:]
            pairs = left * len(self._levels[level - 1]) + right
            pairs[(left == _ABSENT) | (right == _ABSENT)] = _ABSENT
            numbers = self._named(pairs, level, extend=extend)
            width, level = width + step, level + 1
        return numbers

    def _named(self, keys: Tokens, level: int, *, extend: bool) -> Tokens:
        """Return the place of each key among the known ones of a level."""
        if extend:
            known, places = np.unique(keys, return_inverse=True)
            self._levels.append(known)
            return places
        known = self._levels[level]
        if not len(known):
            return np.full(len(keys), _ABSENT)
        places = np.minimum(np.searchsorted(known, keys), len(known) - 1)
        places[(known[places] != keys) | (keys == _ABSENT)] = _ABSENT
        return places


class GrowingRuns:
    """The ceiling over a history that grows by a sequence at a time.

    Sequences lie in groups, each with its windows. A group is numbered again only together with one
    that is about as large, so that every token takes part in a logarithmic number of numberings.
    """

    def __init__(self, min_run: int = MIN_RUN) -> None:
        self.min_run = min_run
        self._groups: list[tuple[list[Tokens], Windows]] = []

    def add(self, sequence: Sequence[int] | Tokens, known: int = 0) -> None:
        """Make a sequence live.

        Args:
            sequence: token ids.
            known: number of its first tokens that another live sequence begins with as well.
        """
        new = token_ids(sequence)[max(0, known - self.min_run + 1) :]
        if len(new) < self.min_run:
            return
        members, size = [new], len(new)
        while self._groups and self._groups[-1][1].tokens <= 2 * size:
            others, windows = self._groups.pop()
            members, size = others + members, size + windows.tokens
        self._groups.append((members, Windows(members, self.min_run)))

    def covered(self, prompt: Sequence[int] | Tokens) -> Mask:
        """Return which tokens of ``prompt`` lie in a run that occurs in a live sequence."""
        ids = token_ids(prompt)
        mask = np.zeros(len(ids), dtype=np.bool_)
        for _, windows in self._groups:
            mask |= windows.covered(ids)
        return mask
