"""Sessions in this process: bounded in number, bytes and age.

An idle session is packed: an agent that waits for its user costs kilobytes.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..model.history import HistoryMatch
from ..model.session import Session
from .codec import UNENCODABLE, decode_session, encode_session
from .freed import give_back_freed
from .store import SessionChange
from .summary import SessionOverview, overview
from .table import OpenTurns, SessionName, SessionTable


@dataclass(frozen=True)  # no slots: its line is computed once
class _Entry:
    """A session, possibly packed."""

    name: SessionName
    key: str
    chain: tuple[int, ...]
    touched: float
    used: float
    """Time of the last update or read."""
    session: Session | None
    packed: bytes = b""
    seen: SessionOverview | None = None
    """Overview of a packed session."""

    @cached_property
    def line(self) -> SessionOverview:
        """The session's line in the list of sessions, which is read often."""
        if self.session is not None:
            return overview(self.session)
        assert self.seen is not None  # noqa: S101 - set where it is packed
        return self.seen

    @property
    def size(self) -> int:
        return len(self.packed) if self.session is None else self.session.weight


class MemorySessionStore:
    """A :class:`~leyline_proxy.sessions.store.SessionStore` for one process.

    Changes run on the event loop without an await inside, which makes every update atomic.
    """

    def __init__(
        self,
        *,
        max_sessions: int,
        ttl_s: float,
        max_bytes: int = 1 << 30,
        idle_pack_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._idle_pack_s = idle_pack_s
        self._clock = clock
        self._unpacked: OrderedDict[SessionName, None] = OrderedDict()
        """Sessions that aren't packed, in order of use."""
        self._table: SessionTable[_Entry] = SessionTable(
            max_sessions=max_sessions,
            max_bytes=max_bytes,
            ttl_s=ttl_s,
            clock=clock,
            dropped=lambda name: self._unpacked.pop(name, None),
        )
        self._open_turns = OpenTurns()

    @property
    def name(self) -> str:
        """``memory``."""
        return "memory"

    @property
    def problem(self) -> str | None:
        """Always None."""
        return None

    @property
    def copies(self) -> None:
        """Always None."""
        return None

    @property
    def held_bytes(self) -> int:
        """Approximate size of all sessions in bytes."""
        return self._table.bytes

    async def get(self, tenant: str, session_id: str) -> Session | None:
        session = self._opened((tenant, session_id))
        in_flight = self._open_turns.of((tenant, session_id))
        return replace(session, in_flight=in_flight) if session and in_flight else session

    async def matches(
        self, tenant: str, key: str, chain: Sequence[int], shortest_partial: int
    ) -> Sequence[HistoryMatch]:
        return self._table.matches(tenant, key, chain, shortest_partial)

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
        session = change(self._opened(name))
        old = self._table.get(name)
        known = old.chain if old else ()
        now = self._clock()
        history = known if chain is None else tuple(chain)
        self._in_use(name)
        self._table.update(_Entry(name, session.key, history, now, now, session))
        if ends is not None:
            self._open_turns.close(name, ends)
        return session

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
        self._open_turns.open((tenant, session_id), turn)

    async def close_turn(self, tenant: str, session_id: str, turn: str) -> None:
        self._open_turns.close((tenant, session_id), turn)

    async def delete(self, tenant: str, session_id: str) -> bool:
        name = (tenant, session_id)
        return self._table.get(name) is not None and self._table.drop(name)

    async def sessions(self, tenant: str) -> tuple[SessionOverview, ...]:
        return tuple(entry.line for entry in self._table.of(tenant))

    async def count(self) -> int:
        return len(self._table)

    async def connect(self) -> None:
        """Do nothing."""

    async def run(self) -> None:
        """Pack sessions that have become idle, forever."""
        while True:
            await asyncio.sleep(self._idle_pack_s / 2)
            await self.pack_idle()

    async def aclose(self) -> None:
        """Do nothing: the store holds nothing open."""

    async def pack_idle(self) -> None:
        """Pack sessions unused for ``idle_pack_s`` seconds, outside the event loop."""
        horizon = self._clock() - self._idle_pack_s
        packed_any = False
        while (name := next(iter(self._unpacked), None)) is not None:
            entry = self._table.get(name)
            if entry is None:
                self._unpacked.pop(name, None)  # it has just expired
                continue
            if entry.used > horizon:
                break
            # Removed from the queue even if it can't be packed; its next use puts it back.
            del self._unpacked[name]
            if entry.session is None:
                continue
            try:
                packed = await asyncio.to_thread(encode_session, entry.session)
            except UNENCODABLE:
                continue
            if self._table.get(name) is entry:
                self._table.replace(replace(entry, session=None, packed=packed, seen=entry.line))
                packed_any = True
        if packed_any:
            del entry
            await asyncio.to_thread(give_back_freed)

    def _opened(self, name: SessionName) -> Session | None:
        """Return the session, unpacked and marked as used."""
        entry = self._table.get(name)
        if entry is None:
            return None
        session = decode_session(entry.packed) if entry.session is None else entry.session
        if session is None:
            self._table.drop(name)
            return None
        used = replace(entry, session=session, packed=b"", seen=None, used=self._clock())
        self._table.replace(used)
        self._in_use(name)
        return session

    def _in_use(self, name: SessionName) -> None:
        self._unpacked[name] = None
        self._unpacked.move_to_end(name)
