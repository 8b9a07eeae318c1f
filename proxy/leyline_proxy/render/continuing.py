"""Results for the beginning of a list, found by the identity of its objects.

A session's turn repeats the objects of the turn before and adds some. The result for the repeated
ones is found without examining each: by the last of them and its index.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from operator import is_
from threading import Lock
from typing import Generic, TypeVar

from ..model.text_memory import NO_SESSION, Left, Reader, forgotten_with, left_of

_Item = TypeVar("_Item")
_Value = TypeVar("_Value")

REACH = 8
"""Number of items at a list's end among which the end of an earlier list is searched."""


@dataclass(frozen=True, slots=True)
class Beginning(Generic[_Item, _Value]):
    """A list, and the result for it."""

    items: Sequence[_Item]
    """Kept alive, so no other object gets their identities; never changed."""
    value: _Value
    weight: int
    """Approximate bytes in memory."""
    reader: Reader = NO_SESSION
    """The session whose list it is."""

    @property
    def key(self) -> tuple[int, int]:
        """Key for the lookup."""
        return id(self.items[-1]), len(self.items)


class Beginnings(Generic[_Item, _Value]):
    """A bounded memory of lists, least recently used out first. Safe to use from several threads.

    Args:
        max_bytes: approximate bound of the memory.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._held: OrderedDict[Hashable, Beginning[_Item, _Value]] = OrderedDict()
        self._lock = Lock()

    @property
    def remembered_bytes(self) -> int:
        """Approximate bytes in memory now."""
        return self._bytes

    def find(
        self, items: Sequence[_Item], reader: Reader = NO_SESSION
    ) -> Beginning[_Item, _Value] | None:
        """Return a session's longest stored list at the start of ``items``, if it ends near their
        end. Another session's is of no use: what it remembers goes with its own forgets."""
        for length in range(len(items), max(0, len(items) - REACH), -1):
            with self._lock:
                found = self._held.get((id(items[length - 1]), length))
                own = found is not None and found.reader.owner == reader.owner
                if found is not None and own and all(map(is_, found.items, items)):
                    self._held.move_to_end(found.key)
                    return found
        return None

    def put(
        self,
        items: Sequence[_Item],
        value: _Value,
        weight: int,
        instead_of: Beginning[_Item, _Value] | None = None,
        reader: Reader = NO_SESSION,
    ) -> None:
        """Store the result for ``items``; there must be at least one.

        Args:
            instead_of: an entry that is no longer needed.
            reader: the session whose list it is.
        """
        fresh = Beginning(items, value, weight, reader)
        with self._lock:
            for gone in (instead_of, self._held.get(fresh.key)):
                if gone is not None and self._held.get(gone.key) is gone:
                    del self._held[gone.key]
                    self._bytes -= gone.weight
            self._held[fresh.key] = fresh
            self._bytes += weight
            while self._bytes > self._max_bytes:
                _, oldest = self._held.popitem(last=False)
                self._bytes -= oldest.weight

    def forget(self, tenant: str, session: str, demands: int | None) -> None:
        """Drop a session's lists; see
        :meth:`~leyline_proxy.model.text_memory.TextMemory.forget`."""
        owners = forgotten_with(tenant, session)
        with self._lock:
            gone = [
                each
                for each in self._held.values()
                if each.reader.owner in owners
                and (demands is None or each.reader.demands <= demands)
            ]
            for each in gone:
                del self._held[each.key]
                self._bytes -= each.weight

    def left(self, tenant: str, session: str, demands: int) -> Left:
        """Return the number of a session's lists."""
        with self._lock:
            readers = [each.reader for each in self._held.values()]
        return left_of([r.demands for r in readers if r.owner == (tenant, session)], demands)
