"""Sessions by tenant, history and age: bounded in number, bytes and age. Pure but for the clock.

If there are too many, the tenant with the most loses its least recently updated ones, so no tenant
evicts another's sessions. Turns that nobody has settled yet are noted beside them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Generic, Protocol, TypeVar

from ..model.history import HistoryMatch

_Holders = tuple[str, ...]

_MAX_PARTIAL = 16
"""Partial matches considered; more than one of the same length is ambiguous anyway."""

_MESSAGE_BYTES = 120
"""Bytes of a message in the index of histories."""

SessionName = tuple[str, str]
"""Tenant and session."""


class HistoryIndex:
    """Sessions of a tenant and store key by the hash of messages 0..i."""

    def __init__(self) -> None:
        self._tables: dict[tuple[str, str], dict[int, _Holders]] = {}

    def holders(self, tenant: str, key: str, value: int) -> _Holders:
        """Return the sessions whose chain contains ``value``, in order of insertion."""
        return self._tables.get((tenant, key), {}).get(value, ())

    def replace(
        self, tenant: str, session: str, key: str, old: Sequence[int], new: Sequence[int]
    ) -> None:
        """Replace one chain of a session with another; their common prefix stays untouched."""
        same = sum(1 for _ in takewhile(bool, map(int.__eq__, old, new)))
        self.remove(tenant, session, key, old[same:])
        if len(new) == same:
            return
        table = self._tables.setdefault((tenant, key), {})
        # Most values have one holder: all values of a session share one tuple.
        alone = table.get(new[same - 1], ()) if same else ()
        alone = alone if len(alone) == 1 else (session,)
        for value in new[same:]:
            holders = table.get(value)
            table[value] = alone if holders is None else (*holders, session)

    def remove(self, tenant: str, session: str, key: str, chain: Sequence[int]) -> None:
        """Remove a session's chain."""
        table = self._tables.get((tenant, key))
        if table is None:
            return
        for value in chain:
            rest = tuple(holder for holder in table.get(value, ()) if holder != session)
            if rest:
                table[value] = rest
            else:
                table.pop(value, None)
        if not table:
            del self._tables[tenant, key]


class Entry(Protocol):
    """A session, in any form."""

    @property
    def name(self) -> SessionName:
        """Tenant and session."""

    @property
    def key(self) -> str:
        """Name under which its history is found."""

    @property
    def chain(self) -> tuple[int, ...]:
        """Its history: the hash of messages 0..i for each i."""

    @property
    def touched(self) -> float:
        """Time of the last update."""

    @property
    def size(self) -> int:
        """Bytes of the session itself."""


E = TypeVar("E", bound=Entry)


@dataclass(slots=True)
class _Share:
    """The sessions of one tenant."""

    order: OrderedDict[str, None] = field(default_factory=OrderedDict)
    """Ids of its sessions, in order of their last update."""
    bytes: int = 0


class SessionTable(Generic[E]):
    """Sessions and their order, index and bounds.

    Args:
        max_sessions: of all tenants.
        max_bytes: of all sessions, with their entries in the index; a single session stays in any
            case.
        ttl_s: seconds after its last update at which a session expires.
        clock: returns seconds that never go back, as in :attr:`Entry.touched`.
        dropped: called with each session that is dropped.
    """

    def __init__(
        self,
        *,
        max_sessions: int,
        max_bytes: int,
        ttl_s: float,
        clock: Callable[[], float],
        dropped: Callable[[SessionName], object] = lambda _: None,
    ) -> None:
        self._max_sessions = max_sessions
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._dropped = dropped
        self._entries: OrderedDict[SessionName, E] = OrderedDict()
        """All sessions, in order of their last update."""
        self._shares: dict[str, _Share] = {}
        self._index = HistoryIndex()
        self.bytes = 0
        """Approximate bytes of all sessions."""

    def __len__(self) -> int:
        self._expire()
        return len(self._entries)

    def get(self, name: SessionName) -> E | None:
        """Return a session, or None if it isn't here or has expired."""
        self._expire()
        return self._entries.get(name)

    def of(self, tenant: str) -> Iterator[E]:
        """Yield a tenant's sessions, the latest first."""
        self._expire()
        share = self._shares.get(tenant)
        names = reversed(share.order) if share is not None else ()
        return (self._entries[tenant, name] for name in names)

    def matches(
        self, tenant: str, key: str, chain: Sequence[int], shortest_partial: int
    ) -> tuple[HistoryMatch, ...]:
        """Return the sessions whose history ``chain`` extends or edits; see
        :meth:`~.store.SessionStore.matches`."""
        self._expire()
        found: dict[str, HistoryMatch] = {}
        for length in range(len(chain), 0, -1):
            holders = self._index.holders(tenant, key, chain[length - 1])
            entries = [self._entries[tenant, holder] for holder in holders]
            wholes = [entry for entry in entries if len(entry.chain) == length]
            if length >= shortest_partial:
                for entry in entries:
                    if len(entry.chain) > length and len(found) < _MAX_PARTIAL:
                        session = entry.name[1]
                        found.setdefault(session, HistoryMatch(session, length, whole=False))
            if wholes:
                latest = max(wholes, key=lambda entry: entry.touched).name[1]
                found[latest] = HistoryMatch(latest, length, whole=True)
                break
        return tuple(found.values())

    def update(self, new: E) -> None:
        """Put a session in its next state; others may give way."""
        old = self._entries.pop(new.name, None)
        self._reindex(old, new)
        self._weigh(old, new)
        self._shares[new.name[0]].order.move_to_end(new.name[1])
        while len(self._entries) > self._max_sessions:
            self._drop_of(max(self._shares, key=lambda name: len(self._shares[name].order)))
        while self.bytes > self._max_bytes and len(self._entries) > 1:
            self._drop_of(max(self._shares, key=lambda name: self._shares[name].bytes))

    def replace(self, new: E) -> None:
        """Put a session that is here in another form; its order, history and age stay."""
        self._weigh(self._entries[new.name], new)

    def drop(self, name: SessionName) -> bool:
        """Drop a session; return True if it was here."""
        entry = self._entries.pop(name, None)
        if entry is None:
            return False
        share = self._shares[name[0]]
        share.bytes -= _weight(entry)
        self.bytes -= _weight(entry)
        del share.order[name[1]]
        if not share.order:
            del self._shares[name[0]]
        self._index.remove(*name, entry.key, entry.chain)
        self._dropped(name)
        return True

    def _weigh(self, old: E | None, new: E) -> None:
        tenant, session = new.name
        share = self._shares.setdefault(tenant, _Share())
        more = _weight(new) - (_weight(old) if old is not None else 0)
        self.bytes += more
        share.bytes += more
        share.order.setdefault(session)
        self._entries[new.name] = new

    def _reindex(self, old: E | None, new: E) -> None:
        if old is not None and old.key != new.key:
            self._index.remove(*old.name, old.key, old.chain)
            old = None
        known = old.chain if old is not None else ()
        self._index.replace(*new.name, new.key, known, new.chain)

    def _expire(self) -> None:
        horizon = self._clock() - self._ttl_s
        while self._entries and next(iter(self._entries.values())).touched < horizon:
            self.drop(next(iter(self._entries)))

    def _drop_of(self, tenant: str) -> None:
        self.drop((tenant, next(iter(self._shares[tenant].order))))


def _weight(entry: Entry) -> int:
    return entry.size + _MESSAGE_BYTES * len(entry.chain)


class OpenTurns:
    """Names of turns under way. One whose proxy was killed stays: its KV is in no account."""

    def __init__(self) -> None:
        self._open: dict[SessionName, frozenset[str]] = {}

    def of(self, session: SessionName) -> frozenset[str]:
        """Return a session's open turns."""
        return self._open.get(session, frozenset())

    def open(self, session: SessionName, turn: str) -> None:
        """Note a turn."""
        self._open[session] = self.of(session) | {turn}

    def close(self, session: SessionName, turn: str) -> None:
        """Take a turn's note back."""
        rest = self.of(session) - {turn}
        if rest:
            self._open[session] = rest
        else:
            self._open.pop(session, None)
