"""A worker's side of the sessions that workers share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from secrets import randbits

from ..model.history import HistoryMatch
from ..model.session import Session
from ..model.text_memory import Left
from ..sessions.cache import Cached, SessionCache
from ..sessions.codec import UNENCODABLE
from ..sessions.pieces import Exchanged, Pieces, read, write
from ..sessions.store import SessionChange, SessionCopies
from ..sessions.summary import SessionOverview, overview
from ..sessions.table import SessionName
from .link import HubLink
from .session_wire import (
    CLOSE_TURN,
    COUNT,
    DELETE,
    GET,
    MATCHES,
    OF_TENANT,
    OPEN_TURN,
    REPLACE,
    Found,
    Get,
    Match,
    Replace,
    TurnOf,
)

_IDLE_S = 60.0
"""Seconds after which a worker drops a decoded session that it hasn't used."""

_JUST_S = 0.02
"""Seconds for which a search's result saves a question for the session that it found."""


class SharedSessions:
    """A :class:`~leyline_proxy.sessions.store.SessionStore` of one worker.

    Args:
        max_cached_bytes: bytes of sessions that this worker keeps decoded.
    """

    name = "memory"

    def __init__(
        self,
        link: HubLink,
        *,
        max_cached_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = link
        self._cache = SessionCache[Exchanged | None](max_bytes=max_cached_bytes, idle_s=_IDLE_S)
        self._clock = clock
        self._seen: tuple[SessionName, Found, float] | None = None
        """The session that the last search found, and the time."""
        # No other worker, nor an earlier one in this one's place, gives the same numbers.
        self._numbers = count(randbits(62))

    @property
    def problem(self) -> str | None:
        """Always None: a worker without its hub ends."""
        return None

    @property
    def copies(self) -> SessionCopies:
        """The sessions that this worker keeps decoded."""
        return self

    def forget(self, tenant: str, session: str, demands: int | None) -> None:
        """Drop a copy: the session is read again."""
        self._seen = None
        self._cache.forget(tenant, session, demands)

    def left(self, tenant: str, session: str, demands: int) -> Left:
        """Return none; see :class:`~leyline_proxy.sessions.cache.SessionCache`."""
        return self._cache.left(tenant, session, demands)

    async def get(self, tenant: str, session_id: str) -> Session | None:
        cached = self._cache.get(tenant, session_id)
        known = cached.version if cached is not None else b""
        found = self._just_seen((tenant, session_id), known)
        if found is None:
            found = await self._link.ask(GET, Get((tenant, session_id), known))
        session = self._taken(tenant, session_id, found)
        if session is None or not found.open_turns:
            return session
        return replace(session, in_flight=found.open_turns)

    async def matches(
        self, tenant: str, key: str, chain: Sequence[int], shortest_partial: int
    ) -> Sequence[HistoryMatch]:
        found = await self._link.ask(MATCHES, Match(tenant, key, tuple(chain), shortest_partial))
        if found.whole is not None:
            self._seen = (tenant, found.matches[-1].session), found.whole, self._clock()
        return found.matches

    async def update(
        self,
        tenant: str,
        session_id: str,
        change: SessionChange,
        chain: Sequence[int] | None = None,
        *,
        ends: str | None = None,
    ) -> Session:
        name = (tenant, session_id)
        history = None if chain is None else tuple(chain)
        # Most sessions are still what this worker has just read.
        if self._cache.get(*name) is None:
            self._taken(*name, await self._link.ask(GET, Get(name, b"")))
        while True:
            known = self._cache.get(*name)
            session = change(known.session if known is not None else None)
            new, numbers, gone = self._new_pieces(session, known)
            wanted = Replace(
                name,
                known.version if known is not None else b"",
                session.key,
                new,
                gone,
                overview(session),
                history,
                ends,
            )
            done = await self._link.ask(REPLACE, wanted)
            if done.version:
                self._cache.put(session, done.version, numbers, self._clock())
                return session
            self._taken(*name, done.now)

    async def open_turn(
        self,
        tenant: str,
        session_id: str,
        turn: str,
        key: str = "",
        *,
        run: str = "",
        replica: str = "",
    ) -> None:
        await self._link.leave(OPEN_TURN, TurnOf((tenant, session_id), turn))

    async def close_turn(self, tenant: str, session_id: str, turn: str) -> None:
        await self._link.ask(CLOSE_TURN, TurnOf((tenant, session_id), turn))

    async def delete(self, tenant: str, session_id: str) -> bool:
        self._cache.drop(tenant, session_id)
        return await self._link.ask(DELETE, (tenant, session_id))

    async def sessions(self, tenant: str) -> tuple[SessionOverview, ...]:
        return await self._link.ask(OF_TENANT, tenant)

    async def count(self) -> int:
        return await self._link.ask(COUNT, None)

    async def connect(self) -> None:
        """Do nothing: the link is open."""

    async def run(self) -> None:
        """Drop decoded sessions that have become idle, forever."""
        while True:
            await asyncio.sleep(_IDLE_S / 2)
            self._cache.drop_idle(self._clock())

    async def aclose(self) -> None:
        """Do nothing: the link is closed by who opened it."""

    def _just_seen(self, name: SessionName, known: bytes) -> Found | None:
        """Return what a search has just found of a session, if this worker has that version."""
        seen, self._seen = self._seen, None
        if seen is None or seen[0] != name or self._clock() - seen[2] > _JUST_S:
            return None
        return seen[1] if seen[1].version == known else None

    def _taken(self, tenant: str, session_id: str, found: Found) -> Session | None:
        """Return the session that the hub has, and keep it."""
        cached = self._cache.get(tenant, session_id)
        if cached is not None and found.version == cached.version:
            self._cache.put(cached.session, cached.version, cached.beside, self._clock())
            return cached.session
        taken = read(found.pieces) if found.pieces is not None else None
        if taken is None:
            self._cache.drop(tenant, session_id)
            return None
        session, numbers = taken
        self._cache.put(session, found.version, numbers, self._clock())
        return session

    def _new_pieces(
        self, session: Session, known: Cached[Exchanged | None] | None
    ) -> tuple[Pieces, Exchanged | None, tuple[int, ...]]:
        """Return what the hub doesn't have of a session; of one that can't be encoded, its
        account."""
        before, had = None, Exchanged()
        if known is not None and known.beside is not None:
            before, had = known.session, known.beside
        try:
            return write(session, before, had, self._numbers)
        except UNENCODABLE:
            account, _, _ = write(session.without_text(), None, Exchanged(), self._numbers)
            gone = tuple(number for number, _ in had.messages.values())
            return account, None, gone
