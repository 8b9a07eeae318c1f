"""Sessions in Redis.

Every write replaces a whole session if it still has the version that was read; a later writer reads
it again and repeats its change. Entries that find conversations are hints: the store checks their
sessions against the sessions' own histories, so the hints need no transaction.

**Turns missing in the account are a loss.** An engine may hold KV of turns that no stored session
names, and then a forget must be one of everything. Four events cause this:

* A turn is in flight when its proxy is killed. So the proxy notes each turn before the engine gets
  it, which costs one short command; without the note, KV of the turn would survive a forget.
* Turns ran while Redis was gone. The proxy remembers them by session, and writes them when Redis is
  back.
* Redis came back with older data (restarted from a snapshot, a replica took over). Each start of a
  server is a run. Another run begins a new *epoch*, and a session written in an earlier one has a
  loss.
* A proxy is killed while Redis is gone, and its memory is lost. Proxies send heartbeats to Redis; a
  proxy that falls silent without signing off begins a new epoch, too.

A new epoch costs every session one wider forget, and nothing if no forget is demanded.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import random
from secrets import token_hex
from types import MappingProxyType

from ...model.history import HistoryMatch
from ...model.places import MAX_PLACES
from ...model.session import Session
from ..cache import Cached, SessionCache
from ..store import SessionChange, SessionCopies
from ..summary import SessionOverview
from . import keys as names
from .directory import Directory
from .keys import Keys
from .link import RedisLink, StoreGoneError, StoreRefusedError
from .scripts import LOSE, OPEN_TURN, REPLACE, STATE
from .sealing import Seal
from .stored import (
    InFlight,
    Known,
    chain_of,
    fields_of,
    lost_places,
    matches_of,
    nothing_known,
    replicas_of,
    session_of,
    text_of,
)

MAX_LOSSES = 10_000
"""Most sessions remembered one by one; with more, the loss is one of all sessions."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Turns of a session that are in no account."""

    tenant: str
    session: str
    key: str
    turns: int
    places: Mapping[str, str]
    """Replicas by run, of engines that got the turns."""


class Losses:
    """Losses of account by session, in a bounded number."""

    def __init__(self, limit: int = MAX_LOSSES) -> None:
        self._limit = limit
        self._found: dict[tuple[str, str], Loss] = {}
        self.all = False
        """True if there were too many to remember: any session may have lost something."""

    def __bool__(self) -> bool:
        return bool(self._found) or self.all

    def add(
        self,
        tenant: str,
        session: str,
        key: str = "",
        turns: int = 1,
        places: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Note turns of which an engine may hold KV."""
        if self.all:
            return
        known = self._found.get((tenant, session))
        if known is not None:
            key, turns = known.key or key, known.turns + turns
            places = dict([*known.places.items(), *places.items()][-MAX_PLACES:])
        self._found[tenant, session] = Loss(tenant, session, key, turns, places)
        if len(self._found) > self._limit:
            self.too_many()

    def too_many(self) -> None:
        """Replace the losses, which can't be remembered or written one by one, with one of all."""
        self.all = True
        self._found.clear()

    def turns_of(self, tenant: str, session: str) -> int:
        """Return the turns of a session that are in no account; at least 1 if any may be."""
        known = self._found.get((tenant, session))
        return known.turns if known is not None else int(self.all)

    def oldest(self) -> Loss | None:
        """Return the loss to write next."""
        return next(iter(self._found.values()), None)

    def told(self, loss: Loss) -> None:
        """Note that Redis knows a loss; later additions stay."""
        known = self._found.pop((loss.tenant, loss.session), None)
        if known is not None and known.turns > loss.turns:
            rest = known.turns - loss.turns
            self.add(loss.tenant, loss.session, known.key, rest, known.places)

    def told_all(self) -> None:
        """Note that Redis knows that all sessions lost something."""
        self.all = False


_ATTEMPTS = 8
_PAUSE_S = 0.01
"""Longest pause between attempts, times their number; random, so that rivals separate."""

CACHED_BYTES = 256 << 20
"""Bytes of sessions that a process keeps decoded."""

_MAX_IN_FLIGHT = 64
_BEAT_S = 1.0
_SILENT_S = 5.0
"""A proxy without a heartbeat for so long counts as killed."""


class RedisSessionStore:
    """A :class:`~leyline_proxy.sessions.store.SessionStore` for several proxies.

    Args:
        seal: text is stored only if it hides it.
        max_session_bytes: largest stored session; of a longer one only the account is kept.
        max_sessions: with more, the tenant with the most loses its least recently updated ones;
            None for no limit but time.
        max_cached_bytes: bytes of sessions that this proxy keeps decoded.
    """

    def __init__(
        self,
        link: RedisLink,
        *,
        ttl_s: float,
        seal: Seal,
        prefix: str = "leyline",
        max_session_bytes: int = 4 << 20,
        max_sessions: int | None = None,
        max_cached_bytes: int = CACHED_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._link = link
        self._ttl_ms = max(1, round(ttl_s * 1000))
        self._seal = seal
        self._keys = Keys(prefix)
        self._max_session_bytes = max_session_bytes
        self._directory = Directory(
            link, self._keys, seal, ttl_s=ttl_s, max_sessions=max_sessions, clock=clock
        )
        self._cache = SessionCache[tuple[int, ...]](max_bytes=max_cached_bytes, idle_s=60.0)
        self._clock = clock
        self._losses = Losses()
        self._proxy = token_hex(8)

    @property
    def name(self) -> str:
        """``redis``."""
        return "redis"

    @property
    def problem(self) -> str | None:
        return self._link.problem

    async def get(self, tenant: str, session_id: str) -> Session | None:
        now = self._clock()
        try:
            known, _ = await self._read(tenant, session_id)
        except StoreGoneError:
            # An engine may hold much KV of this session. What must not reach it stays known.
            cached = self._cache.get(tenant, session_id)
            verdicts = cached.session.verdicts if cached is not None else ()
            return replace(nothing_known(tenant, session_id, "", now), verdicts=verdicts)
        # What Redis refused to write is in no account until the next heartbeat.
        untold = self._losses.turns_of(tenant, session_id)
        return replace(known, extra=known.extra + untold).as_session(now)

    async def matches(
        self, tenant: str, key: str, chain: Sequence[int], shortest_partial: int
    ) -> Sequence[HistoryMatch]:
        try:
            candidates = await self._directory.candidates(tenant, key, chain, shortest_partial)
        except StoreGoneError:
            return ()
        return matches_of(candidates, chain, shortest_partial)

    async def update(
        self,
        tenant: str,
        session_id: str,
        change: SessionChange,
        chain: Sequence[int] | None = None,
        *,
        ends: str | None = None,
    ) -> Session:
        try:
            for attempt in range(_ATTEMPTS):
                await asyncio.sleep(_PAUSE_S * attempt * random())
                known, epoch = await self._read(tenant, session_id)
                session = change(known.as_session(self._clock(), ends))
                history = known.chain if chain is None else tuple(chain)
                if await self._replace(known, session, history, epoch, ends):
                    return session
            # Others were always faster. Their writes stay, and this turn is a loss.
            places = replicas_of(session)
            await self._tell_loss(Loss(tenant, session_id, session.key, 1, places))
            if ends is not None:
                await self.close_turn(tenant, session_id, ends)
        except StoreGoneError:
            session = change(None)
            self._losses.add(tenant, session_id, session.key, places=replicas_of(session))
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
        note = InFlight(self._clock(), key, run, replica).note()
        try:
            await self._link.run(
                OPEN_TURN,
                self._entries(tenant, session_id),
                *(turn, note, self._ttl_ms, _MAX_IN_FLIGHT, key.encode("utf-8", "surrogatepass")),
            )
        except StoreGoneError:
            return  # settling the turn will fail too, or find Redis back

    async def close_turn(self, tenant: str, session_id: str, turn: str) -> None:
        key = self._keys.in_flight(tenant, session_id)
        try:
            await self._link.call(lambda client: client.hdel(key, turn))
        except StoreGoneError:
            return  # the note stays until it is stale, and counts as a loss

    @property
    def copies(self) -> SessionCopies:
        """The sessions that this proxy keeps decoded."""
        return self._cache

    async def delete(self, tenant: str, session_id: str) -> bool:
        self._cache.drop(tenant, session_id)
        try:
            return await self._directory.remove(tenant, session_id)
        except StoreGoneError:
            return False

    async def sessions(self, tenant: str) -> tuple[SessionOverview, ...]:
        try:
            return await self._directory.listed(tenant, self._clock())
        except StoreGoneError:
            return ()

    async def count(self) -> int:
        try:
            return await self._directory.count(self._clock())
        except StoreGoneError:
            return 0

    async def connect(self) -> None:
        """Check if Redis can be reached."""
        await self._beat()

    async def run(self) -> None:
        """Send heartbeats; check if Redis is back, and write the losses to it."""
        while True:
            await asyncio.sleep(_BEAT_S)
            await self._beat()
            self._cache.drop_idle(self._clock())

    async def aclose(self) -> None:
        """Sign off once all losses are written, and close the connections."""
        await self._beat()
        if not self._losses and self._link.problem is None:
            with contextlib.suppress(StoreGoneError):
                await self._link.call(
                    lambda client: client.hdel(self._keys.state, f"b:{self._proxy}")
                )
        await self._link.aclose()

    async def _beat(self) -> None:
        try:
            runs = await self._link.look()
            while (loss := self._losses.oldest()) is not None:
                try:
                    await self._tell_loss(loss)
                except StoreRefusedError:
                    self._losses.too_many()  # one that can't be written mustn't block the others
                else:
                    self._losses.told(loss)
            everywhere = self._losses.all
            servers = [part for server in runs.items() for part in server]
            await self._link.run(
                STATE,
                [self._keys.state],
                *(self._proxy, round(_SILENT_S * 1000), token_hex(8), str(int(everywhere))),
                *servers,
                probe=True,
            )
        except StoreGoneError:
            return
        if everywhere:
            self._losses.told_all()
        # No await since: later losses happen with the circuit closed.
        if not self._losses:
            self._link.close_circuit(runs)

    async def _tell_loss(self, loss: Loss) -> None:
        entries = self._entries(loss.tenant, loss.session)
        notes = [part for note in lost_places(loss.places, loss.key).items() for part in note]
        raw = loss.key.encode("utf-8", "surrogatepass")
        await self._link.run(LOSE, entries, loss.turns, raw, self._ttl_ms, *notes, probe=True)

    async def _read(self, tenant: str, session_id: str) -> tuple[Known, bytes]:
        """Return a session's known state and the epoch, in one round trip unless others wrote."""
        entry, flight = self._entries(tenant, session_id)
        cached = self._cache.get(tenant, session_id)
        wanted = [names.VERSION, names.LOSSES, names.EPOCH, names.KEY]
        rest = [names.DATA, names.CHAIN]
        asked = wanted if cached is not None else wanted + rest
        # Turns in flight first: a turn settled in between is then seen twice instead of never.
        notes, found, epoch = await self._link.together(
            lambda pipe: (
                pipe.hgetall(flight),
                pipe.hmget(entry, asked),
                pipe.hget(self._keys.state, "epoch"),
            )
        )
        if cached is not None and found[0] != cached.version:
            cached = None
            found = await self._link.call(lambda client: client.hmget(entry, wanted + rest))
        version, extra, written, key = found[:4]
        session, chain = self._taken(tenant, session_id, found, cached)
        known = Known(
            tenant=tenant,
            id=session_id,
            version=version or b"",
            session=session,
            chain=chain,
            key=text_of(key or b""),
            extra=int(extra or 0),
            outdated=bool(version) and written != epoch,
            in_flight={turn.decode(): InFlight.of_note(note) for turn, note in notes.items()},
        )
        return known, epoch or b""

    def _taken(
        self,
        tenant: str,
        session_id: str,
        found: Sequence[bytes | None],
        cached: Cached[tuple[int, ...]] | None,
    ) -> tuple[Session | None, tuple[int, ...]]:
        version = found[0]
        if not version:
            self._cache.drop(tenant, session_id)
            return None, ()
        if cached is not None:
            session, chain = cached.session, cached.beside
        else:
            read = session_of(found[4], tenant, session_id, self._seal)
            chain = chain_of(found[5])
            if read is None:
                return None, chain
            session = read
        self._cache.put(session, version, chain, self._clock())
        return session, chain

    async def _replace(
        self, known: Known, session: Session, chain: tuple[int, ...], epoch: bytes, ends: str | None
    ) -> bool:
        """Write the next version; return False if another was written since ``known`` was read."""
        version = token_hex(8)
        fields = fields_of(
            session, chain, self._seal, epoch=epoch, version=version, most=self._max_session_bytes
        )
        over = known.stale(self._clock()) | ({ends} if ends is not None else set())
        pairs = [part for pair in fields.items() for part in pair]
        done = await self._link.run(
            REPLACE,
            self._entries(known.tenant, known.id),
            *(known.version, self._ttl_ms, known.extra, len(pairs), *pairs, *sorted(over)),
        )
        if not done:
            return False
        self._cache.put(session, version.encode(), chain, self._clock())
        with contextlib.suppress(StoreGoneError):  # a session that isn't found starts afresh
            await self._directory.enter(session, chain, self._clock())
        return True

    def _entries(self, tenant: str, session_id: str) -> tuple[str, str]:
        return self._keys.of_digest(self._keys.digest(tenant, session_id))
