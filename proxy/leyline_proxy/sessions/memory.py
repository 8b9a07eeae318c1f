"""Sessions in this process: bounded in number, least recently used out first, and by age."""

from __future__ import annotations

import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..core.session import Session
from .store import SessionChange


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_sessions = max_sessions
        self._ttl_s = ttl_s
        self._clock = clock
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()
        self._by_prefix: dict[tuple[str, str, int], dict[tuple[str, str], None]] = defaultdict(dict)

    async def get(self, tenant: str, session_id: str) -> Session | None:
        self._expire()
        entry = self._entries.get((tenant, session_id))
        return entry.session if entry else None

    async def find(
        self, tenant: str, key: str, chain: Sequence[int], shortest_partial: int
    ) -> Session | None:
        self._expire()
        for length in range(len(chain), 0, -1):
            identities = self._by_prefix.get((tenant, key, chain[length - 1]), {})
            entries = [
                entry
                for entry in map(self._entries.__getitem__, identities)
                if length >= shortest_partial or len(entry.chain) == length
            ]
            if entries:
                return max(entries, key=lambda entry: entry.touched).session
        return None

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
        while len(self._entries) > self._max_sessions:
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
        tenant, key = entry.session.tenant, entry.session.key
        for value in entry.chain:
            holders = self._by_prefix.get((tenant, key, value))
            if holders is not None:
                holders.pop(entry.identity, None)
                if not holders:
                    del self._by_prefix[tenant, key, value]
