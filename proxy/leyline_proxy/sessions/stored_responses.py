"""Stores of responses for ``previous_response_id``, and those that only a connection has."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol
from uuid import uuid4

from ..model.stored_response import StoredResponse, decode, encode

_MOST = 2000
"""Responses of one connection; the longest chain has as many."""


class ResponseSource(Protocol):
    """Responses that a request may continue."""

    async def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """Return a response, or None if it never existed, has expired or was deleted."""
        ...


class SessionResponses(Protocol):
    """The responses of whole sessions."""

    async def count_in(self, tenant: str, session: str) -> int | None:
        """Return the number of a session's responses; None if the store can't be reached."""
        ...

    async def delete_from(self, tenant: str, session: str, turn: int) -> int:
        """Delete a session's responses of a turn and of later ones; return their number.

        Args:
            turn: number in the session.
        """
        ...


class ResponseStore(ResponseSource, SessionResponses, Protocol):
    """Responses by tenant and id. No method ever crosses from one tenant to another.

    No method raises: an unreachable store keeps nothing and knows nothing.
    """

    async def put(self, tenant: str, response_id: str, stored: StoredResponse) -> None:
        """Keep a response; it replaces one with the same id."""
        ...

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Delete a response; return True if it existed."""
        ...


@dataclass(frozen=True, slots=True)
class _Entry:
    raw: bytes
    touched: float
    session: str
    turn: int


@dataclass(slots=True)
class _Held:
    """The responses of one tenant."""

    entries: OrderedDict[str, _Entry] = field(default_factory=OrderedDict)
    bytes: int = 0


class ResponseShelf:
    """Encoded responses, bounded in number, bytes and age. No event loop.

    If there are too many, the tenant with the most loses its least recently used ones, so that no
    tenant evicts another's. Reading counts as use, so a conversation that continues stays whole.
    """

    def __init__(
        self,
        *,
        max_responses: int,
        max_bytes: int,
        ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._held: dict[str, _Held] = {}

    def put(self, tenant: str, response_id: str, raw: bytes, session: str, turn: int) -> None:
        """Keep a response; see :meth:`ResponseStore.put`."""
        self._expire()
        self._remove(tenant, response_id)
        if len(raw) > self._max_bytes:
            # It would evict all others and still not fit.
            return
        held = self._held.setdefault(tenant, _Held())
        held.entries[response_id] = _Entry(raw, self._clock(), session, turn)
        held.bytes += len(raw)
        while sum(len(each.entries) for each in self._held.values()) > self._max_responses:
            self._drop_oldest(max(self._held, key=lambda name: len(self._held[name].entries)))
        while sum(each.bytes for each in self._held.values()) > self._max_bytes:
            self._drop_oldest(max(self._held, key=lambda name: self._held[name].bytes))

    def get(self, tenant: str, response_id: str) -> bytes | None:
        """Return a response; see :meth:`ResponseStore.get`."""
        self._expire()
        held = self._held.get(tenant)
        entry = held.entries.pop(response_id, None) if held is not None else None
        if held is None or entry is None:
            return None
        held.entries[response_id] = replace(entry, touched=self._clock())
        return entry.raw

    def delete(self, tenant: str, response_id: str) -> bool:
        """Delete a response; return True if it existed."""
        self._expire()
        return self._remove(tenant, response_id)

    def count_in(self, tenant: str, session: str) -> int:
        """Return the number of a session's responses."""
        self._expire()
        held = self._held.get(tenant)
        entries = held.entries.values() if held is not None else ()
        return sum(entry.session == session for entry in entries)

    def delete_from(self, tenant: str, session: str, turn: int) -> int:
        """Delete a session's responses; see :meth:`ResponseStore.delete_from`."""
        self._expire()
        held = self._held.get(tenant)
        found = [
            response_id
            for response_id, entry in (held.entries.items() if held is not None else ())
            if entry.session == session and entry.turn >= turn
        ]
        return sum([self._remove(tenant, each) for each in found])

    def _expire(self) -> None:
        horizon = self._clock() - self._ttl_s
        for tenant in [*self._held]:
            # In order of the last use, so the oldest come first.
            while (held := self._held.get(tenant)) is not None:
                if next(iter(held.entries.values())).touched >= horizon:
                    break
                self._drop_oldest(tenant)

    def _drop_oldest(self, tenant: str) -> None:
        self._remove(tenant, next(iter(self._held[tenant].entries)))

    def _remove(self, tenant: str, response_id: str) -> bool:
        held = self._held.get(tenant)
        entry = held.entries.pop(response_id, None) if held is not None else None
        if held is None or entry is None:
            return False
        held.bytes -= len(entry.raw)
        if not held.entries:
            del self._held[tenant]
        return True


class MemoryResponseStore:
    """A :class:`ResponseStore` for one process, above its shelf."""

    def __init__(self, shelf: ResponseShelf) -> None:
        self._shelf = shelf

    async def put(self, tenant: str, response_id: str, stored: StoredResponse) -> None:
        self._shelf.put(tenant, response_id, encode(stored), stored.session, stored.turn)

    async def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        raw = self._shelf.get(tenant, response_id)
        return decode(raw) if raw is not None else None

    async def delete(self, tenant: str, response_id: str) -> bool:
        return self._shelf.delete(tenant, response_id)

    async def count_in(self, tenant: str, session: str) -> int | None:
        return self._shelf.count_in(tenant, session)

    async def delete_from(self, tenant: str, session: str, turn: int) -> int:
        return self._shelf.delete_from(tenant, session, turn)


class ConnectionResponses:
    """The responses that requests of one connection can continue: its own, and stored ones.

    Its own are in ``memory`` under a name that nobody else knows, within the bounds that all
    responses of the process have, and leave it with the connection.

    Args:
        stored: responses of all connections.
        memory: keeps nothing on disk.
    """

    def __init__(self, stored: ResponseStore, memory: ResponseStore) -> None:
        self._stored = stored
        self._memory = memory
        self._name = uuid4().hex
        self._own: OrderedDict[str, str] = OrderedDict()
        """Tenants by id."""

    async def put(self, tenant: str, response_id: str, stored: StoredResponse) -> None:
        """Store a response for all connections."""
        await self._stored.put(tenant, response_id, stored)

    async def keep(self, tenant: str, response_id: str, stored: StoredResponse) -> None:
        """Keep a response for this connection alone."""
        await self._memory.put(tenant, self._place(response_id), stored)
        self._own[response_id] = tenant
        if len(self._own) > _MOST:
            oldest, owner = self._own.popitem(last=False)
            await self._memory.delete(owner, self._place(oldest))

    async def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """Return a response of this connection, or a stored one."""
        if self._own.get(response_id) == tenant:
            return await self._memory.get(tenant, self._place(response_id))
        return await self._stored.get(tenant, response_id)

    async def aclose(self) -> None:
        """Forget the connection's own."""
        while self._own:
            response_id, tenant = self._own.popitem()
            await self._memory.delete(tenant, self._place(response_id))

    def _place(self, response_id: str) -> str:
        return f"{self._name}/{response_id}"


class AllResponses:
    """Sessions' stored responses together with those of connections, where two stores have them."""

    def __init__(self, stored: SessionResponses, memory: SessionResponses) -> None:
        self._stored = stored
        self._memory = memory

    async def count_in(self, tenant: str, session: str) -> int | None:
        """Return the number of a session's responses in both."""
        stored = await self._stored.count_in(tenant, session)
        held = await self._memory.count_in(tenant, session)
        return None if stored is None or held is None else stored + held

    async def delete_from(self, tenant: str, session: str, turn: int) -> int:
        """Delete a session's responses of a turn and of later ones, in both."""
        stored = await self._stored.delete_from(tenant, session, turn)
        return stored + await self._memory.delete_from(tenant, session, turn)
