"""The index of fingerprints: a tenant scope and a hash lead to places in retained turns.

Each entry is anchored at the slot of its first token, so it leaves the index when that slot is
freed, and two turns over the same KV have it once. Bounded: a pool has only so many slots, and of
those about one in seventeen has an entry.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from leyline_engine.contract import common_prefix
from leyline_engine.reuse.winnowing import GRAM, Winnower, ends_of_chains
from leyline_engine.sources import SourceTurn

MAX_PLACES = 8
"""Maximum number of places of one hash within a scope; the oldest are dropped first."""
MIN_ENTRIES = 1024
TOKENS_PER_ENTRY = 8
"""The pool's tokens for each entry at most; winnowing needs one entry in seventeen."""

Slots = NDArray[np.int64]


@dataclass(slots=True, eq=False)
class _Path:
    """Tokens that entries point into: those of a session's turn, and of turns that continue it."""

    source: SourceTurn
    slots: set[int] = field(default_factory=set)
    """Anchors of its entries."""
    done: int = 0
    """Number of leading tokens whose entries are in the index, of this path or another."""


@dataclass(frozen=True, slots=True)
class _Entry:
    path: _Path
    position: int
    value: int


@dataclass(frozen=True, slots=True)
class Place:
    """Tokens of a retained turn from ``position`` on have a hash."""

    source: SourceTurn
    position: int


class ReuseIndex:
    """Places by tenant scope and hash.

    The scope that has most entries loses its oldest if there are too many.

    Args:
        winnower: selects fingerprints.
        capacity: slots of the pool.
    """

    def __init__(self, winnower: Winnower, capacity: int) -> None:
        self._winnower = winnower
        self._max_entries = max(MIN_ENTRIES, capacity // TOKENS_PER_ENTRY)
        self._entries: dict[int, _Entry] = {}
        self._marks = np.zeros(capacity, dtype=np.bool_)
        """True for slots that anchor an entry."""
        self._places: dict[tuple[str, int], list[int]] = {}
        """Anchors by scope and hash, oldest first."""
        self._scopes: dict[str, OrderedDict[int, None]] = {}
        """Anchors by scope, oldest first."""
        self._paths: dict[tuple[str, str], list[_Path]] = {}
        """Paths by scope and session, oldest first."""

    def __len__(self) -> int:
        return len(self._entries)

    def anchors(self) -> Collection[int]:
        """Return the slots at which entries are anchored."""
        return self._entries.keys()

    def add(self, source: SourceTurn, slots: Slots) -> None:
        """Add the cached beginning of a turn that was retained.

        Args:
            slots: the slots of its first tokens, in order.
        """
        path = self._path_of(source)
        start = max(0, path.done - self._winnower.guarantee + 1)
        prints = ends_of_chains(self._winnower.select(source.tokens, start, len(slots)))
        for position, value in zip(prints.positions.tolist(), prints.values.tolist(), strict=True):
            self._enter(int(slots[position]), _Entry(path, position, value))
        path.done = len(slots)
        while len(self._entries) > self._max_entries:
            heaviest = max(self._scopes.values(), key=len)
            self._remove(next(iter(heaviest)))

    def _path_of(self, source: SourceTurn) -> _Path:
        """Return the path that a turn continues, or a new one."""
        paths = self._paths.setdefault((source.scope, source.session), [])
        keys = source.keys()
        best = 0
        for path in reversed(paths):
            before = path.source.keys()
            shared = common_prefix(before, keys)
            if shared == len(before):
                # The turn continues it: entries point into the newer one from now on.
                path.source = source
                return path
            best = max(best, min(shared, path.done))
        paths.append(_Path(source, done=best))
        return paths[-1]

    def _enter(self, slot: int, entry: _Entry) -> None:
        if slot >= len(self._marks):
            grown = np.zeros(max(slot + 1, 2 * len(self._marks)), dtype=np.bool_)
            grown[: len(self._marks)] = self._marks
            self._marks = grown
        known = self._entries.get(slot)
        if known is not None:
            if known.value == entry.value:
                return  # the same KV, by another turn
            self._remove(slot)
        scope = entry.path.source.scope
        places = self._places.setdefault((scope, entry.value), [])
        if len(places) == MAX_PLACES:
            self._remove(places[0])
            places = self._places.setdefault((scope, entry.value), [])
        places.append(slot)
        self._entries[slot] = entry
        self._marks[slot] = True
        entry.path.slots.add(slot)
        self._scopes.setdefault(scope, OrderedDict())[slot] = None

    def places(self, scope: str, value: int) -> Iterator[Place]:
        """Yield places of a scope that have a hash, newest first."""
        for slot in reversed(self._places.get((scope, value), ())):
            entry = self._entries[slot]
            yield Place(entry.path.source, entry.position)

    def drop(self, source: SourceTurn, others: Iterable[SourceTurn] = ()) -> None:
        """Drop a turn that is no longer retained.

        Args:
            others: turns of its session that still are; entries of their beginnings stay.
        """
        key = (source.scope, source.session)
        paths = self._paths.get(key, [])
        gone = next((path for path in paths if path.source is source), None)
        if gone is None:
            return
        paths.remove(gone)
        keys = source.keys()
        heir, shared = None, 0
        for other in others:
            length = common_prefix(other.keys(), keys)
            if length > shared:
                heir, shared = other, length
        successor = self._successor(paths, heir) if heir is not None else None
        for slot in tuple(gone.slots):
            entry = self._entries[slot]
            if successor is not None and entry.position + GRAM <= shared:
                self._entries[slot] = _Entry(successor, entry.position, entry.value)
                successor.slots.add(slot)
            else:
                self._remove(slot)
        if not paths:
            self._paths.pop(key, None)

    def _successor(self, paths: list[_Path], heir: SourceTurn) -> _Path:
        for path in paths:
            if path.source is heir:
                return path
        paths.append(_Path(heir, done=len(heir.tokens)))
        return paths[-1]

    def freed(self, slots: Slots) -> None:
        """Drop the entries of slots that were freed."""
        if not self._entries or not len(slots):
            return
        inside = slots[slots < len(self._marks)]
        for slot in inside[self._marks[inside]].tolist():
            entry = self._entries[slot]
            entry.path.done = min(entry.path.done, entry.position)
            self._remove(slot)

    def _remove(self, slot: int) -> None:
        entry = self._entries.pop(slot)
        self._marks[slot] = False
        entry.path.slots.discard(slot)
        scope = entry.path.source.scope
        places = self._places[scope, entry.value]
        places.remove(slot)
        if not places:
            del self._places[scope, entry.value]
        anchors = self._scopes[scope]
        del anchors[slot]
        if not anchors:
            del self._scopes[scope]

    def clear(self) -> None:
        """Drop everything."""
        self._entries.clear()
        self._marks[:] = False
        self._places.clear()
        self._scopes.clear()
        self._paths.clear()
