"""Responses that aren't stored, but that their own connection may continue."""

from __future__ import annotations

from collections import OrderedDict
from uuid import uuid4

from ..model.stored_response import StoredResponse
from .stored_responses import ResponseStore, SessionResponses

_MOST = 2000
"""Responses of one connection; the longest chain has as many."""


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
