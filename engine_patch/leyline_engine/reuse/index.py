"""The index of fingerprints: a tenant scope and a hash lead to places in retained turns.

Each entry is anchored at the slot of its first token, so it leaves the index when that slot is
freed, and two turns of a tenant over the same KV have it once. Bounded: a pool has only so many
slots, and of those about one in seventeen has an entry.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from heapq import nlargest
from itertools import islice

import numpy as np

from leyline_engine.records.sources import SourceTurn
from leyline_engine.reuse.entering import (
    Entering,
    Entry,
    Freeing,
    Leaving,
    Path,
    Prints,
    Slots,
)
from leyline_engine.reuse.fingerprints import Fingerprinter
from leyline_engine.reuse.winnowing import GRAM, ends_of_chains

MAX_PLACES = 8
"""Places of one hash that are enough to find almost all common runs of agents' prompts."""
MIN_ENTRIES = 1024
TOKENS_PER_ENTRY = 8
"""The pool's tokens for each entry at most; winnowing needs one entry in seventeen."""

MAX_MEMBERS = 64
"""Tenants of a request's groups in which it looks for content; those that retained a turn last."""

PLACES_OF_A_MEMBER = 2
"""Places of one hash that are looked at of each other tenant; the newest are."""
_AT_ONCE = 64
"""Entries of one tenant that are dropped at once for others', though it has hardly more."""

_PORTION = 256
"""Entries that are entered at once, in a millisecond or less."""
_SHORT = 1 << 14
"""Tokens whose fingerprints are selected in less than that."""
_PORTIONS = 2
"""Portions that are done at once where nothing waits: a selection, and its first entries."""


@dataclass(frozen=True, slots=True)
class Place:
    """Tokens of a retained turn from ``position`` on have a hash."""

    source: SourceTurn
    position: int


class ReuseIndex:
    """Places by tenant scope and hash.

    The tenant that has most entries loses its oldest if there are too many.

    Args:
        fingerprinter: selects fingerprints.
        capacity: slots of the pool.
        max_places: maximum number of places of one hash within a tenant; the oldest are dropped
            first.
        defers: True if :meth:`work` is called until all entries are entered; else they are at once.
    """

    def __init__(
        self,
        fingerprinter: Fingerprinter,
        capacity: int,
        *,
        max_places: int = MAX_PLACES,
        defers: bool = False,
    ) -> None:
        self._defers = defers
        self._changes: deque[Entering | Leaving | Freeing] = deque()
        """Changes that wait, in the order in which they came."""
        self._fingerprinter = fingerprinter
        self._max_entries = max(MIN_ENTRIES, capacity // TOKENS_PER_ENTRY)
        self._max_places = max_places
        self._tenants: OrderedDict[str, _TenantIndex] = OrderedDict()
        """By scope; the tenant that retained a turn last is the last."""
        self._marks = np.zeros(capacity, dtype=np.bool_)
        """True for slots that may anchor an entry."""

    def __len__(self) -> int:
        return sum(len(tenant.entries) for tenant in self._tenants.values())

    def anchors(self) -> Collection[int]:
        """Return the slots at which entries are anchored."""
        self._finish()
        return {slot for tenant in self._tenants.values() for slot in tenant.entries}

    def entries(self) -> Iterator[tuple[int, Place]]:
        """Yield the anchor and the place of every entry."""
        self._finish()
        for tenant in self._tenants.values():
            for slot, entry in tenant.entries.items():
                yield slot, Place(entry.path.source, entry.position)

    def add(self, source: SourceTurn, slots: Slots) -> None:
        """Add the cached beginning of a turn that was retained.

        The entries of a short one may be entered at once, others by :meth:`work`.

        Args:
            slots: the slots of its first tokens, in order.
        """
        tenant = self._tenants.setdefault(source.scope, _TenantIndex(self._max_places))
        self._tenants.move_to_end(source.scope)
        tenant.groups |= source.groups
        path = tenant.path_of(source)
        start = max(0, path.done - self._fingerprinter.guarantee + 1)

        def select() -> Prints:
            prints = ends_of_chains(self._fingerprinter.select(source.tokens, start, len(slots)))
            anchors = slots[prints.positions]
            self._mark(anchors)
            return Prints(anchors, *prints)

        path.done = len(slots)
        self._change(Entering(tenant, path, select), short=len(slots) - start <= _SHORT)

    def _change(self, change: Entering | Leaving | Freeing, *, short: bool = True) -> None:
        waits = bool(self._changes)
        self._changes.append(change)
        if not self._defers:
            self._finish()
        elif short and not waits:
            for _ in range(_PORTIONS):
                self.work()

    def work(self) -> bool:
        """Make a portion of the changes that wait; returns False if none does."""
        if not self._changes:
            return False
        if not self._changes[0].work(_PORTION):
            self._changes.popleft()
        self._make_room()
        return True

    def _finish(self) -> None:
        while self.work():
            continue

    def _make_room(self) -> None:
        """Drop the oldest entries of the tenants that have most."""
        surplus = len(self) - self._max_entries
        while surplus > 0:
            first, *others = nlargest(2, self._tenants.values(), key=_size)
            ahead = _size(first) - _size(others[0]) if others else surplus
            count = min(surplus, _size(first), max(_AT_ONCE, ahead))
            for _ in range(count):
                first.remove_oldest()
            surplus -= count

    def _mark(self, slots: Slots) -> None:
        highest = int(slots.max(initial=-1))
        if highest >= len(self._marks):
            grown = np.zeros(max(highest + 1, 2 * len(self._marks)), dtype=np.bool_)
            grown[: len(self._marks)] = self._marks
            self._marks = grown
        self._marks[slots] = True

    def places(self, scope: str, value: int) -> Iterator[Place]:
        """Yield places of a scope that have a hash, newest first."""
        tenant = self._tenants.get(scope)
        if tenant is not None:
            yield from tenant.places_of(value)

    def members(self, scope: str, groups: frozenset[str]) -> Members:
        """Return the other tenants that retained turns in one of ``groups``, the latest first."""
        found = (
            self._tenants[name]
            for name in reversed(self._tenants)
            if name != scope and not groups.isdisjoint(self._tenants[name].groups)
        )
        tenants = tuple(islice(found, MAX_MEMBERS))
        return Members(groups, tenants, bounded=next(found, None) is not None)

    def drop(self, source: SourceTurn, others: Iterable[SourceTurn] = ()) -> None:
        """Drop a turn that is no longer retained.

        Args:
            others: turns of its session that still are; entries of their beginnings stay.
        """
        tenant = self._tenants.get(source.scope)
        if tenant is None:
            return
        gone = tenant.drop(source, others)
        if gone is not None:
            self._change(Leaving(tenant, gone))

    def drop_tenant(self, scope: str) -> None:
        """Drop all entries of a tenant."""
        tenant = self._tenants.pop(scope, None)
        self._changes = deque(
            each for each in self._changes if isinstance(each, Freeing) or each.tenant is not tenant
        )

    def freed(self, slots: Slots) -> None:
        """Drop the entries of slots that were freed."""
        if not self._tenants or not len(slots):
            return
        self._change(Freeing(self._tenants, slots, self._unmark))

    def _unmark(self, slots: Slots) -> Slots:
        """Return those slots that may anchor an entry; from now on, none does."""
        inside = slots[slots < len(self._marks)]
        anchors = inside[self._marks[inside]]
        self._marks[anchors] = False
        return anchors

    def clear(self) -> None:
        """Drop everything."""
        self._tenants.clear()
        self._changes.clear()
        self._marks[:] = False


class _TenantIndex:
    """Entries of one tenant."""

    def __init__(self, max_places: int) -> None:
        self._max_places = max_places
        self.groups: frozenset[str] = frozenset()
        """Groups that any of its turns was retained in."""
        self.entries: OrderedDict[int, Entry] = OrderedDict()
        """By anchor, oldest first."""
        self._places: dict[int, list[int]] = {}
        """Anchors by hash, oldest first."""
        self._paths: dict[str, list[Path]] = {}
        """By session, oldest first."""

    def path_of(self, source: SourceTurn) -> Path:
        """Return the path that a turn continues, or a new one."""
        paths = self._paths.setdefault(source.session, [])
        done = 0
        for path in reversed(paths):
            before = path.source
            shared = before.shared_keys(source)
            if shared == len(before.tokens) and path.source.groups <= source.groups:
                # The turn continues it: entries point into the newer one from now on.
                path.source = source
                return path
            done = max(done, min(shared, path.done))
        paths.append(Path(source, done=done))
        return paths[-1]

    def enter(self, slot: int, entry: Entry) -> None:
        """Add an entry, unless another turn of the tenant over the same KV has it.

        A turn that offers it to more groups takes it over.
        """
        known = self.entries.get(slot)
        if known is not None:
            if known.value == entry.value and entry.path.source.groups <= known.path.source.groups:
                return
            self.remove(slot)
        places = self._places.get(entry.value, [])
        if len(places) >= self._max_places:
            self.remove(places[0])
        self._places.setdefault(entry.value, []).append(slot)
        self.entries[slot] = entry
        entry.path.anchors.add(slot)

    def has(self, value: int) -> bool:
        """Return True if a place has a hash."""
        return value in self._places

    def places_of(self, value: int) -> Iterator[Place]:
        """Yield the places that have a hash, newest first."""
        for slot in reversed(self._places.get(value, ())):
            entry = self.entries[slot]
            path = entry.path.place(entry.position, GRAM)
            if path is not None:
                yield Place(path.source, entry.position)

    def drop(self, source: SourceTurn, others: Iterable[SourceTurn]) -> Path | None:
        """Let nothing find a turn any more; see :meth:`ReuseIndex.drop`.

        Returns:
            Its path, whose entries are yet to be dropped; None if it has none of its own.
        """
        paths = self._paths.get(source.session, [])
        gone = next((path for path in paths if path.source is source), None)
        if gone is None:
            return None
        paths.remove(gone)
        shares = [(other.shared_keys(source), other) for other in others]
        gone.inherited, heir = max(shares, key=lambda share: share[0], default=(0, source))
        gone.heir = _path_with(paths, heir) if gone.inherited else gone
        if not paths:
            del self._paths[source.session]
        return gone

    def bequeath(self, slot: int) -> None:
        """Give the entry of a slot to the heir of its path, or drop it."""
        entry = self.entries[slot]
        path = entry.path.place(entry.position, GRAM)
        if path is None:
            self.remove(slot)
        else:
            self.entries[slot] = Entry(path, entry.position, entry.value)
            path.anchors.add(slot)

    def free(self, slot: int) -> None:
        """Drop the entry of a slot that was freed, if there is one."""
        entry = self.entries.get(slot)
        if entry is not None:
            entry.path.done = min(entry.path.done, entry.position)
            self.remove(slot)

    def remove_oldest(self) -> None:
        """Drop the oldest entry."""
        self.remove(next(iter(self.entries)))

    def remove(self, slot: int) -> None:
        """Drop an entry."""
        entry = self.entries.pop(slot)
        entry.path.anchors.discard(slot)
        places = self._places[entry.value]
        places.remove(slot)
        if not places:
            del self._places[entry.value]


def _size(tenant: _TenantIndex) -> int:
    return len(tenant.entries)


@dataclass(frozen=True, slots=True)
class Members:
    """Other tenants of a request's groups."""

    groups: frozenset[str] = frozenset()
    tenants: tuple[_TenantIndex, ...] = ()
    bounded: bool = False
    """True if there are more."""

    def places(self, value: int) -> Iterator[Place]:
        """Yield places that have a hash, of turns that were sent in one of the groups.

        Of other turns, a request must not even learn how many places they have.
        """
        for tenant in self.tenants:
            if tenant.has(value):
                offered = (
                    place
                    for place in tenant.places_of(value)
                    if not self.groups.isdisjoint(place.source.groups)
                )
                yield from islice(offered, PLACES_OF_A_MEMBER)


def _path_with(paths: list[Path], source: SourceTurn) -> Path:
    """Return the path that ends with a turn; a new one if there is none."""
    for path in paths:
        if path.source is source:
            return path
    paths.append(Path(source, done=len(source.tokens)))
    return paths[-1]
