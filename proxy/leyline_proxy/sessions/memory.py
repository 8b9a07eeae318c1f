"""Sessions in this process: bounded in number, bytes and age.

If there are too many, the tenant with the most loses its least recently used ones, so no tenant
evicts another's sessions. An idle session is packed: an agent that waits for its user costs
kilobytes.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ..model.history import HistoryMatch
from ..model.session import Session
from .codec import UNENCODABLE, decode_session, encode_session
from .freed import give_back_freed
from .history_index import HistoryIndex
from .store import SessionChange
from .summary import SessionOverview, overview

_MAX_PARTIAL = 16
"""Partial matches considered; more than one of the same length is ambiguous anyway."""

_MESSAGE_BYTES = 120
"""Bytes of a message in the index of histories."""

_Identity = tuple[str, str]


@dataclass(frozen=True)  # no slots: its line is computed once
class _Entry:
    """A session, possibly packed."""

    identity: _Identity
    key: str
    chain: tuple[int, ...]
    touched: float
    """Time of the last update."""
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
    def weight(self) -> int:
        """Approximate size in bytes."""
        held = len(self.packed) if self.session is None else self.session.weight
        return held + _MESSAGE_BYTES * len(self.chain)


@dataclass(slots=True)
class _Share:
    """The sessions of one tenant."""

    order: OrderedDict[str, None] = field(default_factory=OrderedDict)
    """Ids of its sessions, in order of their last update."""
    bytes: int = 0


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
        self._max_sessions = max_sessions
        self._max_bytes = max_bytes
        self._bytes = 0
        self._ttl_s = ttl_s
        self._idle_pack_s = idle_pack_s
        self._clock = clock
        self._entries: OrderedDict[_Identity, _Entry] = OrderedDict()
        """All sessions, in order of their last update."""
        self._shares: dict[str, _Share] = {}
        self._in_flight: dict[_Identity, frozenset[str]] = {}
        self._unpacked: OrderedDict[_Identity, None] = OrderedDict()
        """Sessions that aren't packed, in order of use."""
        self._index = HistoryIndex()

    @property
    def name(self) -> str:
        """``memory``."""
        return "memory"

    @property
    def problem(self) -> str | None:
        """Always None."""
        return None

    @property
    def held_bytes(self) -> int:
        """Approximate size of all sessions in bytes."""
        return self._bytes

    async def get(self, tenant: str, session_id: str) -> Session | None:
        self._expire()
        session = self._open((tenant, session_id))
        in_flight = self._in_flight.get((tenant, session_id))
        if session is None or in_flight is None:
            return session
        return replace(session, in_flight=in_flight)

    async def matches(
        self, tenant: str, key: str, chain: Sequence[int], shortest_partial: int
    ) -> Sequence[HistoryMatch]:
        self._expire()
        found: dict[str, HistoryMatch] = {}
        for length in range(len(chain), 0, -1):
            holders = self._index.holders(tenant, key, chain[length - 1])
            entries = [self._entries[tenant, holder] for holder in holders]
            wholes = [entry for entry in entries if len(entry.chain) == length]
            if length >= shortest_partial:
                for entry in entries:
                    if len(entry.chain) > length and len(found) < _MAX_PARTIAL:
                        session = entry.identity[1]
                        found.setdefault(session, HistoryMatch(session, length, whole=False))
            if wholes:
                latest = max(wholes, key=lambda entry: entry.touched).identity[1]
                found[latest] = HistoryMatch(latest, length, whole=True)
                break
        return tuple(found.values())

    async def update(
        self,
        tenant: str,
        session_id: str,
        change: SessionChange,
        chain: Sequence[int] | None = None,
        *,
        ends: str | None = None,
    ) -> Session:
        self._expire()
        identity = (tenant, session_id)
        session = change(self._open(identity))
        old = self._entries.pop(identity, None)
        known = old.chain if old else ()
        now = self._clock()
        new = _Entry(
            identity, session.key, known if chain is None else tuple(chain), now, now, session
        )
        self._reindex(old, new)
        self._put(old, new)
        self._shares[tenant].order.move_to_end(session_id)
        if ends is not None:
            self._close(identity, ends)
        while len(self._entries) > self._max_sessions:
            self._drop_of(max(self._shares, key=lambda name: len(self._shares[name].order)))
        # A single session stays, whatever its weight.
        while self._bytes > self._max_bytes and len(self._entries) > 1:
            self._drop_of(max(self._shares, key=lambda name: self._shares[name].bytes))
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
        identity = (tenant, session_id)
        self._in_flight[identity] = self._in_flight.get(identity, frozenset()) | {turn}

    async def close_turn(self, tenant: str, session_id: str, turn: str) -> None:
        self._close((tenant, session_id), turn)

    def _close(self, identity: _Identity, turn: str) -> None:
        rest = self._in_flight.get(identity, frozenset()) - {turn}
        if rest:
            self._in_flight[identity] = rest
        else:
            self._in_flight.pop(identity, None)

    async def delete(self, tenant: str, session_id: str) -> bool:
        self._expire()
        if (tenant, session_id) not in self._entries:
            return False
        self._drop((tenant, session_id))
        return True

    async def sessions(self, tenant: str) -> tuple[SessionOverview, ...]:
        self._expire()
        share = self._shares.get(tenant)
        names = reversed(share.order) if share is not None else ()
        return tuple(self._entries[tenant, name].line for name in names)

    async def count(self) -> int:
        self._expire()
        return len(self._entries)

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
        while (identity := next(iter(self._unpacked), None)) is not None:
            entry = self._entries[identity]
            if entry.used > horizon:
                break
            # Removed from the queue even if it can't be packed; its next use puts it back.
            del self._unpacked[identity]
            if entry.session is None:
                continue
            try:
                packed = await asyncio.to_thread(encode_session, entry.session)
            except UNENCODABLE:
                continue
            if self._entries.get(identity) is entry:
                self._put(entry, replace(entry, session=None, packed=packed, seen=entry.line))
                packed_any = True
        if packed_any:
            del entry
            await asyncio.to_thread(give_back_freed)

    def _open(self, identity: _Identity) -> Session | None:
        """Return the session, unpacked and marked as used."""
        entry = self._entries.get(identity)
        if entry is None:
            return None
        session = decode_session(entry.packed) if entry.session is None else entry.session
        if session is None:
            self._drop(identity)
            return None
        used = replace(entry, session=session, packed=b"", seen=None, used=self._clock())
        self._put(entry, used)
        return session

    def _put(self, old: _Entry | None, new: _Entry) -> None:
        tenant, session_id = new.identity
        share = self._shares.setdefault(tenant, _Share())
        more = new.weight - (old.weight if old else 0)
        self._bytes += more
        share.bytes += more
        share.order.setdefault(session_id)
        self._entries[new.identity] = new
        if new.session is not None:
            self._unpacked[new.identity] = None
            self._unpacked.move_to_end(new.identity)

    def _reindex(self, old: _Entry | None, new: _Entry) -> None:
        if old is not None and old.key != new.key:
            self._index.remove(*old.identity, old.key, old.chain)
            old = None
        known = old.chain if old is not None else ()
        self._index.replace(*new.identity, new.key, known, new.chain)

    def _expire(self) -> None:
        horizon = self._clock() - self._ttl_s
        while self._entries and next(iter(self._entries.values())).touched < horizon:
            self._drop(next(iter(self._entries)))

    def _drop_of(self, tenant: str) -> None:
        self._drop((tenant, next(iter(self._shares[tenant].order))))

    def _drop(self, identity: _Identity) -> None:
        entry = self._entries.pop(identity)
        self._unpacked.pop(identity, None)
        self._bytes -= entry.weight
        share = self._shares[identity[0]]
        share.bytes -= entry.weight
        del share.order[identity[1]]
        if not share.order:
            del self._shares[identity[0]]
        self._index.remove(*identity, entry.key, entry.chain)
