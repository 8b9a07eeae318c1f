"""Sessions that workers share: records with a version in the hub, decoded ones in each worker.

Every write replaces a whole session if it still has the version that was read; a later writer reads
it again and repeats its change. A session outlives the worker that wrote it, and a turn that a
killed worker left open stays a loss of its account.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from secrets import randbits

import msgspec

from ..model.history import HistoryMatch
from ..model.session import Session
from ..model.text_memory import Left
from ..sessions.cache import Cached, SessionCache
from ..sessions.codec import UNENCODABLE, compress, decompress
from ..sessions.freed import give_back_freed
from ..sessions.pieces import Exchanged, Pieces, read, write
from ..sessions.store import SessionChange, SessionCopies
from ..sessions.summary import SessionOverview, overview
from ..sessions.table import OpenTurns, SessionName, SessionTable
from .link import HubLink
from .server import Handlers, Part
from .wire import Method

_PIECES = msgspec.msgpack.Decoder(Pieces)

_IDLE_S = 60.0
"""Seconds after which a worker drops a decoded session that it hasn't used."""

_JUST_S = 0.02
"""Seconds for which a search's result saves a question for the session that it found."""


class Get(msgspec.Struct, array_like=True, frozen=True):
    name: SessionName
    known: bytes
    """The version that the worker has; empty for none."""


class Found(msgspec.Struct, array_like=True, frozen=True):
    version: bytes = b""
    """Empty if there is no session."""
    pieces: Pieces | None = None
    """None if the worker has that version."""
    open_turns: frozenset[str] = frozenset()


class Replace(msgspec.Struct, array_like=True, frozen=True):
    name: SessionName
    read: bytes
    """The version that was read; empty for none."""
    key: str
    new: Pieces
    """Pieces that the hub doesn't have; all in their order."""
    gone: tuple[int, ...]
    """Numbers of messages that it needs no more."""
    line: SessionOverview
    chain: tuple[int, ...] | None
    ends: str | None


class Replaced(msgspec.Struct, array_like=True, frozen=True):
    version: bytes
    """Empty if another version was written since."""
    now: Found


class Match(msgspec.Struct, array_like=True, frozen=True):
    tenant: str
    key: str
    chain: tuple[int, ...]
    shortest_partial: int


class Matched(msgspec.Struct, array_like=True, frozen=True):
    """Sessions, and the version of the one whose whole history is continued: the last."""

    matches: tuple[HistoryMatch, ...]
    whole: Found | None = None


class TurnOf(msgspec.Struct, array_like=True, frozen=True):
    name: SessionName
    turn: str


GET = Method("sessions.get", Get, Found)
REPLACE = Method("sessions.replace", Replace, Replaced)
MATCHES = Method("sessions.matches", Match, Matched)
OPEN_TURN = Method("sessions.open_turn", TurnOf, type(None))
CLOSE_TURN = Method("sessions.close_turn", TurnOf, type(None))
DELETE = Method("sessions.delete", tuple[str, str], bool)
OF_TENANT = Method("sessions.of", str, tuple[SessionOverview, ...])
COUNT = Method("sessions.count", type(None), int)


@dataclass(frozen=True, slots=True)
class _Row:
    """One version of a session, possibly packed."""

    name: SessionName
    key: str
    chain: tuple[int, ...]
    touched: float
    used: float
    version: bytes
    pieces: Pieces
    line: SessionOverview
    packed: bytes = b""
    """The pieces, compressed; there are then none."""

    @property
    def size(self) -> int:
        return len(self.packed) + self.pieces.size

    def pack(self) -> _Row:
        """Return it packed."""
        packed = compress(msgspec.msgpack.encode(self.pieces))
        return replace(self, pieces=Pieces(), packed=packed)

    def unpack(self) -> _Row:
        """Return it as it was before."""
        if not self.packed:
            return self
        return replace(self, pieces=_PIECES.decode(decompress(self.packed)), packed=b"")


class HubSessions(Part):
    """The sessions of all workers.

    Args:
        max_sessions, max_bytes, ttl_s: see :class:`~leyline_proxy.sessions.table.SessionTable`.
        idle_pack_s: seconds without use after which a session is compressed.
    """

    def __init__(
        self,
        *,
        max_sessions: int,
        max_bytes: int,
        ttl_s: float,
        idle_pack_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._idle_pack_s = idle_pack_s
        self._versions = count(1)
        self._unpacked: OrderedDict[SessionName, None] = OrderedDict()
        self._table: SessionTable[_Row] = SessionTable(
            max_sessions=max_sessions,
            max_bytes=max_bytes,
            ttl_s=ttl_s,
            clock=clock,
            dropped=lambda name: self._unpacked.pop(name, None),
        )
        self._open_turns = OpenTurns()

    @property
    def held_bytes(self) -> int:
        """Approximate size of all sessions in bytes."""
        return self._table.bytes

    def handlers(self, handlers: Handlers) -> None:
        handlers.add(GET, lambda _, asked: self._get(asked))
        handlers.add(REPLACE, lambda _, asked: self._replace(asked))
        handlers.add(MATCHES, lambda _, asked: self._matches(asked))
        handlers.add(OPEN_TURN, lambda _, asked: self._open_turns.open(asked.name, asked.turn))
        handlers.add(CLOSE_TURN, lambda _, asked: self._open_turns.close(asked.name, asked.turn))
        handlers.add(DELETE, lambda _, name: self._table.get(name) is not None and self._drop(name))
        handlers.add(OF_TENANT, lambda _, tenant: tuple(row.line for row in self._table.of(tenant)))
        handlers.add(COUNT, lambda _, __: len(self._table))

    async def run(self) -> None:
        """Compress sessions that have become idle, forever."""
        while True:
            await asyncio.sleep(self._idle_pack_s / 2)
            await self.pack_idle()

    async def pack_idle(self) -> None:
        """Compress sessions unused for ``idle_pack_s`` seconds, outside the event loop."""
        horizon = self._clock() - self._idle_pack_s
        packed_any = False
        while (name := next(iter(self._unpacked), None)) is not None:
            row = self._table.get(name)
            if row is not None and row.used > horizon:
                break
            self._unpacked.pop(name, None)
            if row is None or row.packed:
                continue
            packed = await asyncio.to_thread(row.pack)
            if self._table.get(name) is row:
                self._table.replace(packed)
                packed_any = True
        if packed_any:
            del row, packed
            await asyncio.to_thread(give_back_freed)

    def _matches(self, asked: Match) -> Matched:
        chain = asked.chain
        found = self._table.matches(asked.tenant, asked.key, chain, asked.shortest_partial)
        if not found or not found[-1].whole:
            return Matched(found)
        name = (asked.tenant, found[-1].session)
        row = self._table.get(name)
        assert row is not None  # noqa: S101 - it was just found
        return Matched(found, Found(row.version, open_turns=self._open_turns.of(name)))

    def _get(self, asked: Get) -> Found:
        open_turns = self._open_turns.of(asked.name)
        row = self._table.get(asked.name)
        if row is None:
            return Found(open_turns=open_turns)
        row = replace(row.unpack(), used=self._clock())
        self._table.replace(row)
        self._in_use(asked.name)
        if row.version == asked.known:
            return Found(row.version, open_turns=open_turns)
        return Found(row.version, row.pieces, open_turns)

    def _replace(self, asked: Replace) -> Replaced:
        row = self._table.get(asked.name)
        if (row.version if row is not None else b"") != asked.read:
            return Replaced(b"", self._get(Get(asked.name, asked.read)))
        old, new = row.unpack().pieces if row is not None else Pieces(), asked.new
        turns = {**old.turns, **new.turns}
        messages = {**old.messages, **new.messages}
        for number in asked.gone:
            messages.pop(number, None)
        pieces = replace(
            new, turns={number: turns[number] for number in new.order}, messages=messages
        )
        known = row.chain if row is not None else ()
        chain = known if asked.chain is None else asked.chain
        now, version = self._clock(), next(self._versions).to_bytes(8, "big")
        self._in_use(asked.name)
        self._table.update(
            _Row(asked.name, asked.key, chain, now, now, version, pieces, asked.line)
        )
        if asked.ends is not None:
            self._open_turns.close(asked.name, asked.ends)
        return Replaced(version, Found())

    def _in_use(self, name: SessionName) -> None:
        self._unpacked[name] = None
        self._unpacked.move_to_end(name)

    def _drop(self, name: SessionName) -> bool:
        return self._table.drop(name)


class SharedSessions:
    """A :class:`~leyline_proxy.sessions.store.SessionStore` of one worker.

    Args:
        max_cached_bytes: bytes of sessions that this worker keeps decoded.
    """

    name = "memory"

    def __init__(
        self, link: HubLink, *, max_cached_bytes: int, clock: Callable[[], float] = time.monotonic
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
