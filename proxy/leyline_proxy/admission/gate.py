"""Admission of forwarded requests: rate limits and fair queueing."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from time import monotonic
from typing import Any

from prometheus_client import Gauge

from ..errors import QueueFullError, QueueTimeoutError, RateLimitError
from ..telemetry.metrics import Metrics
from ..tenants import Tenant
from .fair_queue import Arrival, Share
from .places import Counts, OwnPlaces, Places, Ticket


class Pace:
    """Starts pieces of work one after the other; tenants take turns.

    If hundreds of requests are ready at once, and each takes milliseconds to plan, a turn of the
    loop would last for seconds, and everything else would wait as long: new connections, health
    checks, chunks of other streams. With this, they wait for one piece.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """Waiting work by tenant, the next tenant first."""
        self._taken = False

    def enter(self, tenant: str) -> asyncio.Future[None] | None:
        """Return None to begin at once, or a future to wait for; cancelled ones are skipped."""
        loop = asyncio.get_running_loop()
        if not self._taken:
            self._taken = True
            loop.call_soon(self._next, loop)
            return None
        ticket = loop.create_future()
        self._waiting.setdefault(tenant, deque()).append(ticket)
        return ticket

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the next piece after a turn of the loop."""
        while self._waiting:
            tenant, line = self._waiting.popitem(last=False)
            ticket = line.popleft()
            if line:
                self._waiting[tenant] = line
            if not ticket.done():
                ticket.set_result(None)
                loop.call_soon(self._next, loop)
                return
        self._taken = False


Watch = Callable[[Coroutine[Any, Any, None]], Awaitable[None]]

_WEIGHT_OF_LAST = 0.1
_FIRST_GUESS_S = 1.0
_LONGEST_RETRY_S = 60


class AdmissionGate:
    """Admits requests, and counts running and waiting ones.

    Args:
        most: largest number of requests under way, of all tenants.
        places: the places, if other processes share them.
        now: seconds of a clock that never goes back.
    """

    def __init__(
        self,
        most: int,
        metrics: Metrics,
        *,
        places: Places | None = None,
        now: Callable[[], float] = monotonic,
    ) -> None:
        self._most = most
        self._places = places or OwnPlaces(most, now=now)
        self._pace = Pace()
        self._metrics = metrics
        self._now = now
        self._running: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()
        self._reading: dict[str, int] = {}
        self._usual_s = _FIRST_GUESS_S
        """Usual seconds that a request keeps its place."""

    async def counts(self, tenant: str) -> Counts:
        """Return the number of a tenant's requests, those of other workers included."""
        return await self._places.counts(tenant)

    async def check_rate(self, tenant: Tenant) -> None:
        """Count one request.

        Raises:
            RateLimitError: the tenant has used up this minute's requests.
        """
        rate = tenant.limits.requests_per_minute
        if rate is None:
            return
        wait_s = await self._places.take(tenant.name, rate)
        if wait_s > 0:
            self._metrics.limited.labels(tenant.name, RateLimitError.code).inc()
            raise RateLimitError(rate, wait_s)

    @contextmanager
    def reading(self, tenant: Tenant) -> Iterator[None]:
        """Count a request whose body is read: a tenant has at most as many in memory as could run
        and wait.

        Raises:
            QueueFullError: too many are being read.
        """
        name, limits = tenant.name, tenant.limits
        count = self._reading.get(name, 0)
        if count >= (limits.max_concurrent or self._most) + limits.max_queued:
            self._metrics.limited.labels(name, QueueFullError.code).inc()
            raise QueueFullError(limits.max_queued, self._retry_after_s(tenant))
        self._reading[name] = count + 1
        try:
            yield
        finally:
            self._reading[name] -= 1
            if not self._reading[name]:
                del self._reading[name]

    @asynccontextmanager
    async def place(self, tenant: Tenant, watch: Watch) -> AsyncIterator[None]:
        """Hold a place for one request, from its turn in the queue until its response has ended.

        Args:
            watch: runs the waiting; if it raises, the request leaves the queue with that error.

        Raises:
            QueueFullError: too many of the tenant's requests wait already.
            QueueTimeoutError: it has waited for the longest allowed time.
        """
        name, limits = tenant.name, tenant.limits
        arrived = self._now()
        ticket: Ticket = asyncio.get_running_loop().create_future()
        try:
            share = Share(limits.weight, limits.max_concurrent, limits.max_queued)
            entry = await self._places.enter(name, share, ticket)
            if entry is Arrival.FULL:
                self._metrics.limited.labels(name, QueueFullError.code).inc()
                raise QueueFullError(limits.max_queued, self._retry_after_s(tenant))
            if entry is Arrival.WAITS:
                with self._counted(self._waiting, self._metrics.queue_waiting, name):
                    await watch(self._wait(tenant, ticket))
            with self._counted(self._running, self._metrics.queue_running, name):
                started = self._now()
                try:
                    if (turn := self._pace.enter(name)) is not None:
                        await turn
                        started = self._now()
                    self._metrics.queue_seconds.labels(name).observe(started - arrived)
                    yield
                finally:
                    held = self._now() - started
                    self._usual_s += (held - self._usual_s) * _WEIGHT_OF_LAST
        finally:
            self._places.leave(name, ticket)

    async def _wait(self, tenant: Tenant, ticket: Ticket) -> None:
        limit = tenant.limits.queue_timeout_s
        try:
            async with asyncio.timeout(limit):
                await ticket
        except TimeoutError as error:
            self._metrics.limited.labels(tenant.name, QueueTimeoutError.code).inc()
            raise QueueTimeoutError(limit, self._retry_after_s(tenant)) from error

    @contextmanager
    def _counted(self, counts: Counter[str], gauge: Gauge, name: str) -> Iterator[None]:
        """Count a request of this process, and show the count."""
        counts[name] += 1
        gauge.labels(name).set(counts[name])
        try:
            yield
        finally:
            counts[name] -= 1
            gauge.labels(name).set(counts[name])

    def _retry_after_s(self, tenant: Tenant) -> int:
        """Estimate, within bounds, the seconds until a place is free for one more request."""
        places = min(self._most, tenant.limits.max_concurrent or self._most)
        ahead = self._waiting[tenant.name] + 1
        return min(_LONGEST_RETRY_S, max(1, math.ceil(ahead * self._usual_s / places)))
