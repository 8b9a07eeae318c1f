"""The choice of fingerprints: by winnowing, or of chunks."""

from __future__ import annotations

from array import array
from dataclasses import replace
from enum import StrEnum
from typing import Protocol

import numpy as np

from .chunking import SUB_WINDOW, ChunkRule, chunks, sub_windows
from .winnowing import Fingerprints, Winnower


class MatcherKind(StrEnum):
    """A way to choose fingerprints."""

    WINNOW = "winnow"
    """Finds every common run of 64 tokens; see :mod:`.winnowing`."""
    CDC = "cdc"
    """Finds runs that contain a whole chunk; see :mod:`.chunking`. For comparison."""
    OFF = "off"
    """Finds nothing and indexes nothing: only what the proxy names is reused; see :mod:`.named`."""


def read_matcher(name: str) -> MatcherKind:
    """Return the way that an operator chose.

    Raises:
        ValueError: there is none of this name; the message lists those that there are.
    """
    try:
        return MatcherKind(name)
    except ValueError:
        known = ", ".join(MatcherKind)
        raise ValueError(f"matcher: none is called {name!r}; there are {known}") from None


class Fingerprinter(Protocol):
    """Selects fingerprints; equal runs of two sequences have some in common."""

    @property
    def guarantee(self) -> int:
        """Number of tokens that decide which fingerprints a run in their middle has."""

    def select(self, tokens: array[int], start: int = 0, end: int | None = None) -> Fingerprints:
        """Return the fingerprints of ``tokens[start:end]``, with positions in ``tokens``."""


class Chunker:
    """Digests of chunks, and of windows of a chunk, for runs that have only a part of it.

    Args:
        rule: where chunks end.
    """

    def __init__(self, rule: ChunkRule) -> None:
        self._rule = rule

    @property
    def guarantee(self) -> int:
        """The length of the longest chunk; a shorter common run may have no whole one."""
        return self._rule.most

    def select(self, tokens: array[int], start: int = 0, end: int | None = None) -> Fingerprints:
        """See :meth:`Fingerprinter.select`. Where a chunk ends depends on all chunks before it."""
        whole = tokens if end is None else tokens[:end]
        found: list[tuple[int, int]] = []
        for chunk in chunks(whole, self._rule):
            windows = [part for part in sub_windows(whole, chunk) if len(part) == SUB_WINDOW]
            found += [(window.start, window.digest) for window in windows]
            # At its last token: the first window has its first one.
            found.append((chunk.end - 1, chunk.digest))
        found = [(at, digest) for at, digest in found if at >= start]
        positions = np.array([at for at, _ in found], dtype=np.int64)
        return Fingerprints(positions, np.array([digest for _, digest in found], dtype=np.uint64))


class NoFingerprints:
    """Selects none."""

    @property
    def guarantee(self) -> int:
        """No run has a fingerprint."""
        return 1

    def select(self, tokens: array[int], start: int = 0, end: int | None = None) -> Fingerprints:
        """See :meth:`Fingerprinter.select`."""
        return Fingerprints(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.uint64))


def fingerprinter(kind: MatcherKind, seed: int, rule: ChunkRule | None = None) -> Fingerprinter:
    """Return a way to choose fingerprints.

    Args:
        seed: makes them differ between engines.
        rule: where chunks end, for :attr:`MatcherKind.CDC`.
    """
    if kind is MatcherKind.WINNOW:
        return Winnower(seed)
    if kind is MatcherKind.OFF:
        return NoFingerprints()
    return Chunker(replace(rule or ChunkRule(), seed=seed))
