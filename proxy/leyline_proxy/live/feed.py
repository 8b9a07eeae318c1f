"""Events by tenant, for any number of viewers.

A tenant's events are in one ring, and each viewer has a place in it: nothing is buffered for a
viewer. One that is slower than the ring has missed some; it is informed and starts again. Without
viewers there is no ring, and an event costs only the sum of a step.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from secrets import token_hex
from typing import Any, Protocol

from prometheus_client import Gauge

from leyline_engine.contract import TokenCounts

from ..errors import TryLaterError
from ..model.session import Session
from ..sessions.summary import overview, session_overview, turn_document
from .trend import Step, Trends

_RETRY_AFTER_S = 10


@dataclass(frozen=True, slots=True)
class FeedLimits:
    """Bounds of the viewers' cost."""

    ring: int = 512
    """Number of a tenant's events by which a viewer may lag."""
    ring_bytes: int = 4 << 20
    """Total bytes of these events; the newest stays whatever its size."""
    viewers_of_tenant: int = 16
    viewers: int = 256
    lingers_s: float = 60.0
    """Seconds that a ring is kept for a returning viewer."""


class TooManyViewersError(TryLaterError):
    """A tenant has the largest number of viewers."""

    code = "too_many_viewers"


class NoPlaceForViewersError(TooManyViewersError):
    """All tenants together have the largest number of viewers."""

    status = 503
    kind = "server_error"


def encoded(document: Any) -> bytes:
    """Return JSON in one line. Any name or number of callers and engines can be encoded: a viewer
    must not make a turn fail."""
    return json.dumps(document, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class Event:
    """One event under its number."""

    number: int
    kind: str
    data: bytes
    session: str
    updated: float
    """The session's time of update at the event; 0 if the event changes no session."""


class _Channel:
    """One tenant's ring."""

    def __init__(self, limits: FeedLimits) -> None:
        self.epoch = token_hex(4)
        self.ring: deque[Event] = deque()
        self.last = 0
        self._limits = limits
        self._bytes = 0
        self.viewers = 0
        self.left_at = 0.0
        self.changed = asyncio.Event()

    def publish(self, kind: str, data: bytes, session: str, updated: float) -> None:
        self.last += 1
        limits = self._limits
        self.ring.append(Event(self.last, kind, data, session, updated))
        self._bytes += len(data)
        while len(self.ring) > limits.ring or (
            self._bytes > limits.ring_bytes and len(self.ring) > 1
        ):
            self._bytes -= len(self.ring.popleft().data)
        self.changed.set()
        self.changed = asyncio.Event()


class Viewer:
    """A place in a tenant's ring."""

    def __init__(self, channel: _Channel, place: int | None) -> None:
        self._channel = channel
        self._place = place
        """Number of its last event; None if it has none to continue from."""

    @property
    def behind(self) -> bool:
        """True if it has missed events, or begins with none: a snapshot is due."""
        ring = self._channel.ring
        oldest = ring[0].number if ring else self._channel.last + 1
        return self._place is None or self._place < oldest - 1

    def begin_anew(self) -> str:
        """Continue after the newest event, and return its id.

        Call this before the snapshot is made: events meanwhile are then sent twice rather than
        never."""
        self._place = self._channel.last
        return self.id_of(self._place)

    def take(self) -> Sequence[Event]:
        """Return the events after its place, which advances; not for a viewer that lags."""
        place = self._place or 0
        found = [event for event in self._channel.ring if event.number > place]
        if found:
            self._place = found[-1].number
        return found

    def id_of(self, number: int) -> str:
        """Return an event's id for clients."""
        return f"{self._channel.epoch}-{number}"

    async def wait(self, seconds: float) -> None:
        """Wait for an event, for at most ``seconds``."""
        if self._channel.last > (self._place or 0):
            return
        try:
            async with asyncio.timeout(seconds):
                await self._channel.changed.wait()
        except TimeoutError:
            return


class Peers(Protocol):
    """The feeds of the proxy's other workers."""

    def wants(self, tenant: str) -> bool:
        """Return True if any of them has viewers of a tenant's events."""

    def publish(self, tenant: str, kind: str, data: bytes, session: str, updated: float) -> None:
        """Pass an event on to them; see :class:`Event`."""

    def viewed(self, tenant: str, viewed: bool) -> None:
        """Report that this feed keeps a tenant's events, or doesn't any more."""

    def count(self, tenant: str, at: float, tokens: TokenCounts, thinking: tuple[int, int]) -> None:
        """Count a turn for the trend; see :meth:`.trend.Trends.add`."""

    async def trend(self, tenant: str) -> list[Step]:
        """Return the last hour's steps of all workers."""


class NoPeers:
    """The :class:`Peers` of a proxy with one process."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._trends = Trends()

    def wants(self, tenant: str) -> bool:
        return False

    def publish(self, tenant: str, kind: str, data: bytes, session: str, updated: float) -> None:
        """Do nothing."""

    def viewed(self, tenant: str, viewed: bool) -> None:
        """Do nothing."""

    def count(self, tenant: str, at: float, tokens: TokenCounts, thinking: tuple[int, int]) -> None:
        self._trends.add(tenant, at, tokens, thinking)

    async def trend(self, tenant: str) -> list[Step]:
        return self._trends.of(tenant, self._now())


class LiveFeed:
    """The events of this proxy's turns for its viewers.

    Args:
        gauge: shows the number of viewers.
        peers: the feeds of other workers.
        now: returns seconds since the epoch.
        clock: returns seconds that never go back.
    """

    def __init__(
        self,
        gauge: Gauge,
        limits: FeedLimits = FeedLimits(),
        *,
        peers: Peers | None = None,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gauge = gauge
        self._peers = peers or NoPeers(now)
        self._limits = limits
        self._now = now
        self._clock = clock
        self._channels: dict[str, _Channel] = {}
        self._viewers = 0

    def settled(self, session: Session) -> None:
        """Publish the session's newest turn, which was answered in full."""
        turn = session.history[-1]
        tenant = session.tenant
        if turn.receipt is not None:
            thinking = turn.paid.thinking if turn.paid is not None else (0, 0)
            self._peers.count(tenant, self._now(), turn.receipt.tokens, thinking)
        if self._wanted(tenant):
            line = session_overview(overview(session))
            document = {"session": line, "turn": turn_document(turn)}
            self._publish(tenant, "turn", document, session.id, session.updated)

    def lost(self, tenant: str, session_id: str, how: str) -> None:
        """Publish that a turn was refused or abandoned; it isn't part of its session."""
        if self._wanted(tenant):
            document = {"session": session_id, "how": how, "at": self._now()}
            self._publish(tenant, "lost", document, session_id, 0.0)

    def came(self, tenant: str, kind: str, data: bytes, session: str, updated: float) -> None:
        """Publish another worker's event."""
        channel = self._open(tenant)
        if channel is not None:
            channel.publish(kind, data, session, updated)

    async def trend(self, tenant: str) -> list[Step]:
        """Return the last hour's steps; see :class:`~.trend.Trends`."""
        return await self._peers.trend(tenant)

    def _wanted(self, tenant: str) -> bool:
        return self._open(tenant) is not None or self._peers.wants(tenant)

    def _publish(self, tenant: str, kind: str, document: Any, session: str, updated: float) -> None:
        data = encoded(document)
        self.came(tenant, kind, data, session, updated)
        self._peers.publish(tenant, kind, data, session, updated)

    @contextmanager
    def viewing(self, tenant: str, last_event: str = "") -> Iterator[Viewer]:
        """Yield a viewer of the tenant's events.

        Args:
            last_event: id of the client's last event.

        Raises:
            TooManyViewersError: the largest number of viewers is reached.
        """
        self._sweep()
        channel = self._channels.get(tenant)
        if channel is not None and channel.viewers >= self._limits.viewers_of_tenant:
            raise TooManyViewersError(
                f"{channel.viewers} viewers look on for this tenant, which is the limit.",
                _RETRY_AFTER_S,
            )
        if self._viewers >= self._limits.viewers:
            raise NoPlaceForViewersError("As many look on as this proxy allows.", _RETRY_AFTER_S)
        if channel is None:
            channel = self._channels[tenant] = _Channel(self._limits)
            self._peers.viewed(tenant, True)
        self._count(channel, 1)
        try:
            yield Viewer(channel, _place(channel, last_event))
        finally:
            self._count(channel, -1)
            channel.left_at = self._clock()

    def _count(self, channel: _Channel, change: int) -> None:
        channel.viewers += change
        self._viewers += change
        self._gauge.set(self._viewers)

    def _open(self, tenant: str) -> _Channel | None:
        channel = self._channels.get(tenant)
        if channel is not None and self._idle(channel):
            self._drop(tenant)
            return None
        return channel

    def _drop(self, tenant: str) -> None:
        del self._channels[tenant]
        self._peers.viewed(tenant, False)

    def _sweep(self) -> None:
        for tenant in [name for name, each in self._channels.items() if self._idle(each)]:
            self._drop(tenant)

    def _idle(self, channel: _Channel) -> bool:
        gone_s = self._clock() - channel.left_at
        return not channel.viewers and gone_s > self._limits.lingers_s


def _place(channel: _Channel, last_event: str) -> int | None:
    epoch, _, number = last_event.partition("-")
    if epoch != channel.epoch or not (number.isascii() and number.isdigit()) or len(number) > 15:
        return None
    place = int(number)
    return place if place <= channel.last else None
