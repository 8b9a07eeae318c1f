"""Places for requests and other work, and who waits for them: of one process, or of all workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Generic, Protocol, TypeVar

from ..errors import QueueFullError, QueueTimeoutError
from .bucket import TokenBucket
from .fair_queue import Arrival, FairQueue, Share

T = TypeVar("T")

Ticket = asyncio.Future[None]
"""Done once its request has a place."""

_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Counts:
    """A tenant's requests."""

    running: int = 0
    waiting: int = 0


class Places(Protocol):
    """The places, and the requests of this minute."""

    async def enter(self, tenant: str, share: Share, ticket: Ticket) -> Arrival:
        """Admit a request, queue it, or refuse it."""

    def leave(self, tenant: str, ticket: Ticket) -> None:
        """End a request that entered, in whatever state it is; nothing if it was refused."""

    async def counts(self, tenant: str) -> Counts:
        """Return the number of a tenant's requests."""

    async def take(self, tenant: str, per_minute: float) -> float:
        """Count one of a tenant's requests per minute; return 0.0, or the seconds to wait."""


class PlaceBook(Generic[T]):
    """Tickets with a place, and waiting ones. No event loop.

    Args:
        places: of all tenants.
        granted: called with a waiting ticket that gets its place.
    """

    def __init__(self, places: int, granted: Callable[[T], object]) -> None:
        self._queue: FairQueue[T] = FairQueue(places)
        self._granted = granted
        self._running: set[T] = set()

    def enter(self, tenant: str, share: Share, ticket: T) -> Arrival:
        """Admit a request, queue it, or refuse it."""
        arrival = self._queue.enter(tenant, ticket, share)
        if arrival is Arrival.RUNS:
            self._running.add(ticket)
        return arrival

    def leave(self, tenant: str, ticket: T) -> None:
        """End a request; its place goes to the next one."""
        if self._queue.leave(tenant, ticket) or ticket not in self._running:
            return
        self._running.discard(ticket)
        self._queue.release(tenant)
        while granted := self._queue.grant():
            self._running.add(granted[1])
            self._granted(granted[1])

    def counts(self, tenant: str) -> Counts:
        """Return the number of a tenant's requests."""
        return Counts(self._queue.running(tenant), self._queue.waiting(tenant))


class Rates:
    """Requests per minute, by tenant.

    Args:
        now: seconds of a clock that never goes back.
    """

    def __init__(self, now: Callable[[], float] = monotonic) -> None:
        self._now = now
        self._buckets: dict[str, tuple[float, TokenBucket]] = {}

    def take(self, tenant: str, per_minute: float) -> float:
        """Count one request; return 0.0, or the seconds until there may be another."""
        now = self._now()
        held = self._buckets.get(tenant)
        if held is None or held[0] != per_minute:
            held = self._buckets[tenant] = (per_minute, TokenBucket(per_minute, now))
        return held[1].take(now)


class OwnPlaces:
    """The :class:`Places` of one process."""

    def __init__(self, places: int, *, now: Callable[[], float] = monotonic) -> None:
        self._book: PlaceBook[Ticket] = PlaceBook(places, _grant)
        self._rates = Rates(now)

    async def enter(self, tenant: str, share: Share, ticket: Ticket) -> Arrival:
        return self._book.enter(tenant, share, ticket)

    def leave(self, tenant: str, ticket: Ticket) -> None:
        self._book.leave(tenant, ticket)

    async def counts(self, tenant: str) -> Counts:
        return self._book.counts(tenant)

    async def take(self, tenant: str, per_minute: float) -> float:
        return self._rates.take(tenant, per_minute)


def _grant(ticket: Ticket) -> None:
    if not ticket.done():  # else its request leaves in a moment
        ticket.set_result(None)


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
