"""Places for requests, shared fairly among tenants. Pure: no clock, no event loop.

Start-time fair queueing: a tenant's requests are served in order of arrival; between tenants, the
next free place goes to the one with the earliest virtual time, and serving a request advances it by
1/weight. An idle tenant gets no credit, and one that used idle places isn't charged for them later.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Arrival(Enum):
    """The result of a request's arrival."""

    RUNS = "runs"
    WAITS = "waits"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Share:
    """A tenant's share of the places."""

    weight: float = 1.0
    max_running: int | None = None
    """Largest number of running requests; None for all places."""
    max_waiting: int = 128


@dataclass(slots=True)
class _Line(Generic[T]):
    """One tenant's requests."""

    share: Share
    running: int = 0
    waiting: dict[T, int] = field(default_factory=dict)
    """Tickets in order of arrival, each with its number among all arrivals."""
    finish: float = 0.0
    """Virtual time at which the last served request is done."""

    @property
    def full(self) -> bool:
        limit = self.share.max_running
        return limit is not None and self.running >= limit


class FairQueue(Generic[T]):
    """The running and the waiting requests.

    No request waits while a place is free for it, provided that :meth:`grant` is called until it
    returns None after each :meth:`release`."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._running = 0
        self._came = 0
        self._now = 0.0
        self._lines: dict[str, _Line[T]] = {}

    @property
    def total_running(self) -> int:
        """Number of requests that have a place."""
        return self._running

    def running(self, tenant: str) -> int:
        """Return the number of a tenant's requests that have a place."""
        line = self._lines.get(tenant)
        return 0 if line is None else line.running

    def waiting(self, tenant: str) -> int:
        """Return the number of a tenant's requests that wait."""
        line = self._lines.get(tenant)
        return 0 if line is None else len(line.waiting)

    def enter(self, tenant: str, ticket: T, share: Share) -> Arrival:
        """Admit a request, queue it, or refuse it.

        Args:
            share: of the tenant, from now on.
        """
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = _Line(share)
        line.share = share
        if self._running < self._places and not line.full and not line.waiting:
            self._start(line)
            return Arrival.RUNS
        if len(line.waiting) >= share.max_waiting:
            self._tidy(tenant, line)
            return Arrival.FULL
        self._came += 1
        line.waiting[ticket] = self._came
        return Arrival.WAITS

    def leave(self, tenant: str, ticket: T) -> bool:
        """Remove a waiting request; return False if it no longer waited."""
        line = self._lines.get(tenant)
        if line is None or line.waiting.pop(ticket, None) is None:
            return False
        self._tidy(tenant, line)
        return True

    def release(self, tenant: str) -> None:
        """Return the place of a tenant's request."""
        line = self._lines[tenant]
        line.running -= 1
        self._running -= 1
        self._tidy(tenant, line)

    def grant(self) -> tuple[str, T] | None:
        """Give a free place to the next request; None if there is no place or no request for it."""
        if self._running >= self._places:
            return None
        able = [
            (max(self._now, line.finish), next(iter(line.waiting.values())), tenant)
            for tenant, line in self._lines.items()
            if line.waiting and not line.full
        ]
        if not able:
            return None
        _, _, tenant = min(able)
        line = self._lines[tenant]
        ticket = next(iter(line.waiting))
        del line.waiting[ticket]
        self._start(line)
        return tenant, ticket

    def _start(self, line: _Line[T]) -> None:
        line.running += 1
        self._running += 1
        self._now = max(self._now, line.finish)
        line.finish = self._now + 1 / line.share.weight

    def _tidy(self, tenant: str, line: _Line[T]) -> None:
        """Forget a tenant that has nothing here and whose virtual time has passed."""
        if not self._running and not any(each.waiting for each in self._lines.values()):
            # No tenants compete any more.
            self._lines.clear()
            self._now = 0.0
        elif not line.running and not line.waiting and line.finish <= self._now:
            del self._lines[tenant]
