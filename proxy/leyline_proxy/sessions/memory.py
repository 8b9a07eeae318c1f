"""Sessions in this process: bounded in number, bytes and age, least recently used out first."""

from __future__ import annotations

import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..core.identity import HistoryMatch
from ..core.session import Session
from .store import SessionChange

_MAX_PARTIAL = 16
"""Partial matches looked at; more than one of the same length is ambiguous anyway."""


@dataclass(frozen=True, slots=True)
class _Entry:
    session: Session
    chain: tuple[int, ...]
    touched: float

    @property
    def identity(self) -> tuple[str, str]:
        return self.session.tenant, self.session.id


class MemorySessionStore:
    """A :class:`~leyline_proxy.sessions.store.SessionStore` for one process.

    Changes run on the event loop without a pause inside, which makes every update atomic.
    """

    def __init__(
        self,
        *,
        max_sessions: int,
        ttl_s: float,
        max_bytes: int = 1 << 30,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_sessions = max_sessions
        self._max_bytes = max_bytes
        self._bytes = 0
        self._ttl_s = ttl_s
        self._clock = clock
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()
        self._by_prefix: dict[tuple[str, str, int], dict[tuple[str, str], None]] = defaultdict(dict)

    async def get(self, tenant: str, session_id: str) -> Session | None:
        self._expire()
        entry = self._entries.get((tenant, session_id))
        return entry.session if entry else None

    async def matches(
        self, tenant: str, key: str, chain: Sequence[int], shortest_partial: int
    ) -> Sequence[HistoryMatch]:
        self._expire()
        found: dict[str, HistoryMatch] = {}
        for length in range(len(chain), 0, -1):
            identities = self._by_prefix.get((tenant, key, chain[length - 1]), {})
            entries = [self._entries[identity] for identity in identities]
            wholes = [entry for entry in entries if len(entry.chain) == length]
            if length >= shortest_partial:
                for entry in entries:
                    if len(entry.chain) > length and len(found) < _MAX_PARTIAL:
                        found.setdefault(
                            entry.session.id, HistoryMatch(entry.session.id, length, whole=False)
                        )
            if wholes:
                latest = max(wholes, key=lambda entry: entry.touched).session.id
                found[latest] = HistoryMatch(latest, length, whole=True)
                break
        return tuple(found.values())

    async def update(
        self,
        tenant: str,
        session_id: str,
        change: SessionChange,
        chain: Sequence[int] | None = None,
    ) -> Session:
        self._expire()
        old = self._entries.pop((tenant, session_id), None)
        try:
            session = change(old.session if old else None)
        except BaseException:
            if old is not None:
                self._entries[old.identity] = old
            raise
        if old is not None:
            self._unindex(old)
        known = old.chain if old else ()
        self._insert(_Entry(session, known if chain is None else tuple(chain), self._clock()))
        return session

    async def sessions(self, tenant: str) -> tuple[Session, ...]:
        self._expire()
        return tuple(
            entry.session
            for (owner, _), entry in reversed(self._entries.items())
            if owner == tenant
        )

    async def count(self) -> int:
        self._expire()
        return len(self._entries)

    def _insert(self, entry: _Entry) -> None:
        self._entries[entry.identity] = entry
        tenant, key = entry.session.tenant, entry.session.key
        for value in entry.chain:
            self._by_prefix[tenant, key, value][entry.identity] = None
        self._bytes += entry.session.weight
        # The session just inserted stays, whatever its weight: the turn is being served.
        while len(self._entries) > self._max_sessions or (
            self._bytes > self._max_bytes and len(self._entries) > 1
        ):
            self._drop_oldest()

    def _expire(self) -> None:
        horizon = self._clock() - self._ttl_s
        # The dictionary is in order of the last update, so the oldest are in front.
        while self._entries and next(iter(self._entries.values())).touched < horizon:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, entry = self._entries.popitem(last=False)
        self._unindex(entry)

    def _unindex(self, entry: _Entry) -> None:
        self._bytes -= entry.session.weight
        tenant, key = entry.session.tenant, entry.session.key
        for value in entry.chain:
            holders = self._by_prefix.get((tenant, key, value))
            if holders is not None:
                holders.pop(entry.identity, None)
                if not holders:
                    del self._by_prefix[tenant, key, value]
