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
from ..sessions.cache import Cached, SessionCache
from ..sessions.codec import UNENCODABLE, decode_pieces, encode_head, encode_turn
from ..sessions.store import SessionChange
from ..sessions.summary import SessionOverview, overview
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
        self._cache = SessionCache(max_bytes=max_cached_bytes, idle_s=_IDLE_S)
        self._clock = clock
        # No other worker, nor an earlier one in this one's place, gives the same numbers.
        self._numbers = count(randbits(62))

    @property
    def problem(self) -> str | None:
        """Always None: a worker without its hub ends."""
        return None

    async def get(self, tenant: str, session_id: str) -> Session | None:
        cached = self._cache.get(tenant, session_id)
        known = cached.version if cached is not None else b""
        found = await self._link.ask(GET, Get((tenant, session_id), known))
        session = self._taken(tenant, session_id, found)
        if session is None or not found.open_turns:
            return session
        return replace(session, in_flight=found.open_turns)

    async def matches(
        self, tenant: str, key: str, chain: Sequence[int], shortest_partial: int
    ) -> Sequence[HistoryMatch]:
        return await self._link.ask(MATCHES, Match(tenant, key, tuple(chain), shortest_partial))

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
            head, pieces, new = self._pieces(session, known)
            wanted = Replace(
                name,
                known.version if known is not None else b"",
                session.key,
                head,
                pieces,
                new,
                overview(session),
                history,
                ends,
            )
            done = await self._link.ask(REPLACE, wanted)
            if done.version:
                self._cache.put(session, done.version, pieces, self._clock())
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
        await self._link.ask(OPEN_TURN, TurnOf((tenant, session_id), turn))

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

    def _taken(self, tenant: str, session_id: str, found: Found) -> Session | None:
        """Return the session that the hub has, and keep it."""
        cached = self._cache.get(tenant, session_id)
        if cached is not None and found.version == cached.version:
            self._cache.put(cached.session, cached.version, cached.beside, self._clock())
            return cached.session
        session = None
        if found.head is not None:
            session = decode_pieces(found.head, [*found.pieces.values()])
        if session is None:
            self._cache.drop(tenant, session_id)
            return None
        self._cache.put(session, found.version, tuple(found.pieces), self._clock())
        return session

    def _pieces(
        self, session: Session, known: Cached | None
    ) -> tuple[bytes, tuple[int, ...], dict[int, bytes]]:
        """Return a session's head, the numbers of its turns, and new turns; of one that can't be
        encoded, those of its account."""
        had = {}
        if known is not None and known.beside:  # else the hub has no turns of it
            had = dict(zip(map(id, known.session.turns), known.beside, strict=True))
        numbers, new = list[int](), dict[int, bytes]()
        try:
            for turn in session.turns:
                number = had.get(id(turn))
                if number is None:
                    number = next(self._numbers)
                    new[number] = encode_turn(turn)
                numbers.append(number)
            return encode_head(session), tuple(numbers), new
        except UNENCODABLE:
            return encode_head(session.without_text()), (), {}
