"""Places of one process for work besides turns, shared fairly among tenants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ..errors import QueueFullError, QueueTimeoutError
from .fair_queue import Arrival, Share
from .places import OwnPlaces, Ticket

_RETRY_S = 1.0


class FairPlaces:
    """Lets a few pieces of work run at once; tenants take turns.

    Args:
        most: pieces at once, of all tenants.
        of_tenant: pieces at once of one tenant.
        waiting: pieces of one tenant that may wait.
        wait_s: longest wait.
    """

    def __init__(self, most: int, *, of_tenant: int, waiting: int, wait_s: float) -> None:
        self._places = OwnPlaces(most)
        self._share = Share(max_running=of_tenant, max_waiting=waiting)
        self._wait_s = wait_s

    @asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[None]:
        """Hold a place.

        Raises:
            QueueFullError: too much of the tenant's work waits already.
            QueueTimeoutError: no place became free in time.
        """
        ticket: Ticket = asyncio.get_running_loop().create_future()
        try:
            entry = await self._places.enter(tenant, self._share, ticket)
            if entry is Arrival.FULL:
                raise QueueFullError(self._share.max_waiting, _RETRY_S)
            if entry is Arrival.WAITS:
                await self._wait(ticket)
            yield
        finally:
            self._places.leave(tenant, ticket)

    async def _wait(self, ticket: Ticket) -> None:
        try:
            async with asyncio.timeout(self._wait_s):
                await ticket
        except TimeoutError as error:
            raise QueueTimeoutError(self._wait_s, _RETRY_S) from error
