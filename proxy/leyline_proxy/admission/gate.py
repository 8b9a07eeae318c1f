"""Admission of forwarded requests: rate limits and fair queueing."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from time import monotonic
from typing import Any

from ..errors import QueueFullError, QueueTimeoutError, RateLimitError
from ..telemetry.metrics import Metrics
from ..tenants import Tenant
from .bucket import TokenBucket
from .fair_queue import Arrival, FairQueue, Share
from .pace import Pace

Watch = Callable[[Coroutine[Any, Any, None]], Awaitable[None]]

_Ticket = asyncio.Future[None]

_WEIGHT_OF_LAST = 0.1
_FIRST_GUESS_S = 1.0
_LONGEST_RETRY_S = 60


class AdmissionGate:
    """Admits requests, and counts running and waiting ones.

    Args:
        places: largest number of requests under way, of all tenants.
        now: seconds of a clock that never goes back.
    """

    def __init__(
        self, places: int, metrics: Metrics, *, now: Callable[[], float] = monotonic
    ) -> None:
        self._queue: FairQueue[_Ticket] = FairQueue(places)
        self._places = places
        self._pace = Pace()
        self._metrics = metrics
        self._now = now
        self._buckets: dict[str, tuple[float, TokenBucket]] = {}
        self._reading: dict[str, int] = {}
        self._usual_s = _FIRST_GUESS_S
        """Usual seconds that a request keeps its place."""

    def running(self, tenant: str) -> int:
        """Return the number of a tenant's requests under way."""
        return self._queue.running(tenant)

    def waiting(self, tenant: str) -> int:
        """Return the number of a tenant's requests that wait."""
        return self._queue.waiting(tenant)

    def check_rate(self, tenant: Tenant) -> None:
        """Count one request.

        Raises:
            RateLimitError: the tenant has used up this minute's requests.
        """
        rate = tenant.limits.requests_per_minute
        if rate is None:
            return
        now = self._now()
        held = self._buckets.get(tenant.name)
        if held is None or held[0] != rate:
            held = self._buckets[tenant.name] = (rate, TokenBucket(rate, now))
        wait_s = held[1].take(now)
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
        if count >= (limits.max_concurrent or self._places) + limits.max_queued:
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
        arrived = self._now()
        ticket = self._enter(tenant)
        if ticket is not None:
            try:
                await watch(self._wait(tenant, ticket))
            except BaseException:
                self._withdraw(tenant.name, ticket)
                raise
        started = self._now()
        try:
            if (turn := self._pace.enter(tenant.name)) is not None:
                await turn
                started = self._now()
            self._metrics.queue_seconds.labels(tenant.name).observe(started - arrived)
            yield
        finally:
            held = self._now() - started
            self._usual_s += (held - self._usual_s) * _WEIGHT_OF_LAST
            self._release(tenant.name)

    def _enter(self, tenant: Tenant) -> _Ticket | None:
        """Return None for a place, or the ticket to wait with."""
        name, limits = tenant.name, tenant.limits
        ticket: _Ticket = asyncio.get_running_loop().create_future()
        share = Share(limits.weight, limits.max_concurrent, limits.max_queued)
        entry = self._queue.enter(name, ticket, share)
        self._show(name)
        if entry is Arrival.RUNS:
            return None
        if entry is Arrival.FULL:
            self._metrics.limited.labels(name, QueueFullError.code).inc()
            raise QueueFullError(limits.max_queued, self._retry_after_s(tenant))
        return ticket

    async def _wait(self, tenant: Tenant, ticket: _Ticket) -> None:
        limit = tenant.limits.queue_timeout_s
        try:
            async with asyncio.timeout(limit):
                await ticket
        except TimeoutError as error:
            self._metrics.limited.labels(tenant.name, QueueTimeoutError.code).inc()
            raise QueueTimeoutError(limit, self._retry_after_s(tenant)) from error

    def _withdraw(self, name: str, ticket: _Ticket) -> None:
        if ticket.done() and not ticket.cancelled():
            self._release(name)  # it had just been admitted
        elif self._queue.leave(name, ticket):
            self._show(name)

    def _release(self, name: str) -> None:
        self._queue.release(name)
        self._show(name)
        while granted := self._queue.grant():
            tenant, ticket = granted
            if ticket.cancelled():
                # Its request was cancelled, and hasn't left the queue yet.
                self._queue.release(tenant)
            else:
                ticket.set_result(None)
            self._show(tenant)

    def _retry_after_s(self, tenant: Tenant) -> int:
        """Estimate, within bounds, the seconds until a place is free for one more request."""
        places = min(self._places, tenant.limits.max_concurrent or self._places)
        ahead = self._queue.waiting(tenant.name) + 1
        return min(_LONGEST_RETRY_S, max(1, math.ceil(ahead * self._usual_s / places)))

    def _show(self, name: str) -> None:
        self._metrics.queue_running.labels(name).set(self._queue.running(name))
        self._metrics.queue_waiting.labels(name).set(self._queue.waiting(name))
