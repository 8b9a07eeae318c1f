"""Sessions that workers share: records with a version in the hub, decoded ones in each worker.

Every write replaces a whole session if it still has the version that was read; a later writer reads
it again and repeats its change. A session outlives the worker that wrote it, and a turn that a
killed worker left open stays a loss of its account.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count

import msgspec

from ..sessions.codec import compress, decompress
from ..sessions.freed import give_back_freed
from ..sessions.open_turns import OpenTurns
from ..sessions.pieces import Pieces
from ..sessions.summary import SessionOverview
from ..sessions.table import SessionName, SessionTable
from .server import Handlers, Member
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
    Matched,
    Replace,
    Replaced,
)


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


_PIECES = msgspec.msgpack.Decoder(Pieces)


class HubSessions:
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
        """Add the answers to questions about sessions."""
        handlers.add(GET, lambda _, asked: self._get(asked))
        handlers.add(REPLACE, lambda _, asked: self._replace(asked))
        handlers.add(MATCHES, lambda _, asked: self._matches(asked))
        handlers.add(OPEN_TURN, lambda _, asked: self._open_turns.open(asked.name, asked.turn))
        handlers.add(CLOSE_TURN, lambda _, asked: self._open_turns.close(asked.name, asked.turn))
        handlers.add(DELETE, lambda _, name: self._table.get(name) is not None and self._drop(name))
        handlers.add(OF_TENANT, lambda _, tenant: tuple(row.line for row in self._table.of(tenant)))
        handlers.add(COUNT, lambda _, __: len(self._table))

    def left(self, member: Member) -> None:
        """Keep the notes of a worker's open turns: engines may hold KV of them."""

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
