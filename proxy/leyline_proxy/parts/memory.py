"""Entries in this process's memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from .names import Shelf, kind_of, millis_of
from .space import PartUsage


class MemorySpace:
    """A :class:`~.space.Space` in memory.

    Args:
        max_bytes: size of all tenants' entries. Above it, the tenant with the most loses its
            oldest.
    """

    name = "memory"
    problem = None

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._shelves: dict[Shelf, dict[str, bytes]] = {}
        self._tenants: defaultdict[str, dict[str, set[str]]] = defaultdict(dict)
        """Sessions' names of entries, by tenant and session."""
        self._bytes: defaultdict[str, int] = defaultdict(int)
        self._entries = 0

    @property
    def usage(self) -> PartUsage:
        return PartUsage(self._entries, sum(self._bytes.values()))

    async def check(self) -> None:
        """Do nothing."""

    async def names(self, shelf: Shelf) -> Sequence[str]:
        return (*self._shelves.get(shelf, ()),)

    async def read(
        self, shelf: Shelf, names: Collection[str], most: int | None = None
    ) -> Mapping[str, bytes]:
        held = self._shelves.get(shelf, {})
        return {name: held[name][:most] for name in names if name in held}

    async def write(self, shelf: Shelf, entries: Mapping[str, bytes], ttl_s: float) -> None:
        for name, data in entries.items():
            self._drop(shelf, name)
            self._shelves.setdefault(shelf, {})[name] = data
            self._tenants[shelf[0]].setdefault(shelf[1], set()).add(name)
            self._bytes[shelf[0]] += len(data)
            self._entries += 1
        while sum(self._bytes.values()) > self._max_bytes:
            self._relieve(max(self._bytes, key=lambda tenant: self._bytes[tenant]))

    async def remove(self, shelf: Shelf, names: Collection[str]) -> None:
        for name in names:
            self._drop(shelf, name)

    async def trim(self, tenant: str, kind: str, *, most: int, before: int) -> int:
        held = self._oldest(tenant, kind)
        left = sum(size for _, _, _, size in held)
        for at, session, name, size in held:
            if at >= before and left <= most:
                break
            self._drop((tenant, session), name)
            left -= size
        return left

    async def count(self, tenant: str, since: int) -> int:
        return sum(at >= since for at, *_ in self._oldest(tenant, "p"))

    async def tidy(self, before: Mapping[str, int]) -> None:
        for shelf in list(self._shelves):
            for name in list(self._shelves.get(shelf, ())):
                if millis_of(name) < before[kind_of(name)]:
                    self._drop(shelf, name)

    async def aclose(self) -> None:
        """Do nothing."""

    def _oldest(self, tenant: str, kind: str) -> list[tuple[int, str, str, int]]:
        """Return a tenant's entries of a kind, oldest first: time, session, name and size."""
        return sorted(
            (millis_of(name), session, name, len(self._shelves[tenant, session][name]))
            for session, names in self._tenants.get(tenant, {}).items()
            for name in names
            if kind_of(name) == kind
        )

    def _relieve(self, tenant: str) -> None:
        """Drop a tenant's oldest text, or its oldest mark if it has no text."""
        held = self._oldest(tenant, "p") or self._oldest(tenant, "m")
        # Several at once, so that one large entry doesn't sort all again for each.
        over, freed = sum(self._bytes.values()) - self._max_bytes, 0
        for _, session, name, size in held:
            self._drop((tenant, session), name)
            freed += size
            most = max(self._bytes.values(), default=0)
            if freed >= over or self._bytes.get(tenant, 0) < most:
                return

    def _drop(self, shelf: Shelf, name: str) -> None:
        held = self._shelves.get(shelf)
        if held is None or name not in held:
            return
        tenant, session = shelf
        self._bytes[tenant] -= len(held.pop(name))
        self._entries -= 1
        self._tenants[tenant][session].discard(name)
        if not held:
            del self._shelves[shelf], self._tenants[tenant][session]
        if not self._bytes[tenant] and not self._tenants[tenant]:
            del self._bytes[tenant], self._tenants[tenant]
