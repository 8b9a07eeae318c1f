"""Digests of doomed rows, and the rows that they belong to. Bounded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from leyline_engine.proof.digests import Digests, Part, RowDigester
from leyline_engine.proof.witness import Slots
from leyline_engine.records.provenance import Content

MAX_BYTES = 32 << 20
"""Memory for the digests of one proof; of more rows, evenly spaced ones are digested."""

_DIGEST_BYTES = 24
_ROW_BYTES = 80


class DoomedRow(NamedTuple):
    """A row that has to go: what it has read, and its token."""

    content: Content
    """Identity of what it has read."""
    token: int


@dataclass(slots=True)
class _Group:
    """The digests of one group of parts."""

    digests: list[Digests] = field(default_factory=list)
    rows: list[NDArray[np.int64]] = field(default_factory=list)
    table: Digests | None = None
    order: NDArray[np.int64] | None = None

    def add(self, digests: Digests, rows: NDArray[np.int64]) -> None:
        self.digests.append(digests)
        self.rows.append(rows)
        self.table = self.order = None

    def sorted(self) -> tuple[Digests, NDArray[np.int64]]:
        """Return the digests in order of their first word, and the rows they are of."""
        if self.table is None or self.order is None:
            digests, rows = np.concatenate(self.digests), np.concatenate(self.rows)
            order = np.argsort(digests[:, 0], kind="stable")
            self.table, self.order = digests[order], rows[order]
        return self.table, self.order


class DoomedRows:
    """Rows that have to go.

    Args:
        digester: digests rows.
        max_bytes: see :data:`MAX_BYTES`.
    """

    def __init__(self, digester: RowDigester, *, max_bytes: int = MAX_BYTES) -> None:
        self._digester = digester
        self._left = max_bytes
        self._groups: dict[str, _Group] = {}
        self._rows: list[DoomedRow] = []
        self.count = 0
        """Number of rows that had to go and held anything."""

    @property
    def digested(self) -> int:
        """Number of rows that were digested."""
        return len(self._rows)

    def add(self, slots: Slots, rows: Sequence[DoomedRow], parts: Sequence[Part]) -> None:
        """Digest rows that are about to go.

        Args:
            slots: their slots, distinct.
            rows: the same rows as paths and tokens.
            parts: the pool's tensors; rows without content in all of them are left out.
        """
        chosen = self._chosen(len(slots), len(parts))
        slots = slots[chosen]
        found: list[tuple[str, NDArray[np.int64], Digests]] = []
        for part in parts:
            entries = part.entries(slots)
            at = np.flatnonzero(entries >= 0)
            digests = self._digester.digest(part.at(entries[at]))
            held = digests.any(axis=1)
            found.append((part.group, at[held], digests[held]))
        held_rows = np.unique(np.concatenate([at for _, at, _ in found]))
        number = {int(at): len(self._rows) + k for k, at in enumerate(held_rows)}
        self._rows += [rows[int(chosen[at])] for at in held_rows]
        for group, at, digests in found:
            numbers = np.array([number[place] for place in at.tolist()], dtype=np.int64)
            self._groups.setdefault(group, _Group()).add(digests, numbers)
        self.count += len(held_rows)
        self._left -= len(held_rows) * (_ROW_BYTES + _DIGEST_BYTES * len(parts))

    def _chosen(self, count: int, parts: int) -> NDArray[np.int64]:
        """Return which of ``count`` rows memory is left for; the others are counted."""
        room = max(0, self._left // (_ROW_BYTES + _DIGEST_BYTES * parts))
        if count <= room:
            return np.arange(count)
        self.count += count - room
        return np.linspace(0, count - 1, room).astype(np.int64)

    def find(self, part: Part, entries: Slots | None = None) -> dict[int, set[DoomedRow]]:
        """Return the entries of a part that equal doomed rows, with those rows.

        Args:
            entries: entries to look at; None for all.
        """
        group = self._groups.get(part.group)
        if group is None:
            return {}
        table, rows = group.sorted()
        digests = self._digester.digest(part.rows if entries is None else part.at(entries))
        found: dict[int, set[DoomedRow]] = {}
        for at in np.flatnonzero(np.isin(digests[:, 0], table[:, 0])).tolist():
            first, second = digests[at]
            start, end = (np.searchsorted(table[:, 0], first, side) for side in ("left", "right"))
            same = rows[start:end][table[start:end, 1] == second].tolist()
            if same:
                entry = at if entries is None else int(entries[at])
                found[entry] = {self._rows[row] for row in same}
        return found
