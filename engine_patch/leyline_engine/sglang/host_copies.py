"""Copies in the host's memory, as proofs of forgetting see them: a place of its own.

Their slots are numbered after all of the device's, so that a number names one row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from leyline_engine.proof.digests import Part
from leyline_engine.proof.witness import Slots
from leyline_engine.records.publications import Publication
from leyline_engine.rows.host import CopiedRows
from leyline_engine.sglang.rows.host import HOST


class HostCopies:
    """The copies of one tree's rows.

    Args:
        tree: a :class:`.host_tree.HostedRadixCache` if there are any.
        rows: the host's rows; None for a tree without copies.
    """

    def __init__(self, tree: Any, rows: CopiedRows | None) -> None:
        self._tree = tree
        self._rows = rows

    def parts(self) -> list[Part]:
        """Return the tensors to look at."""
        return [] if self._rows is None else self._rows.parts()

    def runs(
        self, path: Publication, start: int = 0, *, alone: bool = False
    ) -> Iterator[tuple[int, Slots]]:
        """Yield the copies of a path's slots after ``start``: where a run begins, and its numbers.

        Args:
            alone: True for copies of what the device has no more.
        """
        if self._rows is None:
            return
        places, copies = self._tree.copies_of(path, alone=alone)
        after = places >= start
        places, numbers = places[after], self._rows.numbers(copies[after])
        breaks = np.flatnonzero(np.diff(places) != 1) + 1
        for run, slots in zip(np.split(places, breaks), np.split(numbers, breaks), strict=True):
            if len(run):
                yield int(run[0]), slots

    def after(self, path: Publication, start: int) -> set[int]:
        """Return the numbers of a path's copies after ``start``."""
        return {slot for _, slots in self.runs(path, start) for slot in slots.tolist()}

    def filled_free(self) -> Mapping[str, Slots]:
        """Return the free rows that hold anything, by place."""
        return {} if self._rows is None else {HOST: self._rows.filled_free()}

    def rows_by_place(self) -> Mapping[str, int]:
        """Return the number of rows by place."""
        return {} if self._rows is None else {HOST: len(self._rows)}
