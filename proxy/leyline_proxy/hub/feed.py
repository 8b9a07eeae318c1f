"""Events for the live pages of all workers: each worker's go to the others that have viewers."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from leyline_engine.contract import TokenCounts

from ..live.feed import LiveFeed
from ..live.trend import Step, Trends
from .link import HubLink
from .server import Handlers, Member, Part
from .wire import Method, Topic


class _Told(msgspec.Struct, array_like=True, frozen=True):
    """An event of a tenant."""

    tenant: str
    kind: str
    data: bytes
    """JSON in one line."""
    session: str
    updated: float


class _Counted(msgspec.Struct, array_like=True, frozen=True):
    tenant: str
    at: float
    tokens: TokenCounts
    thinking: tuple[int, int]


class _Viewed(msgspec.Struct, array_like=True, frozen=True):
    tenant: str
    viewed: bool


PUBLISH = Method("feed.publish", _Told, type(None))
COUNT = Method("feed.count", _Counted, type(None))
VIEWED = Method("feed.viewed", _Viewed, type(None))
TREND = Method("feed.trend", str, list[Step])
EVENT = Topic("feed.event", _Told)
WATCHED = Topic("feed.watched", frozenset[str])


class HubFeed(Part):
    """The tenants with viewers, and the trends."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._viewers: dict[Member, set[str]] = {}
        """Tenants with viewers, by worker."""
        self._trends = Trends()

    def handlers(self, handlers: Handlers) -> None:
        handlers.add(PUBLISH, self._publish)
        handlers.add(VIEWED, self._view)
        handlers.add(COUNT, lambda _, a: self._trends.add(a.tenant, a.at, a.tokens, a.thinking))
        handlers.add(TREND, lambda _, tenant: self._trends.of(tenant, self._now()))

    def joined(self, member: Member) -> None:
        """Begin to inform a worker."""
        self._viewers.setdefault(member, set())
        member.push(WATCHED, self._watched())

    def left(self, member: Member) -> None:
        """Forget a worker's viewers."""
        if self._viewers.pop(member, None):
            self._inform()

    def _publish(self, sender: Member, event: _Told) -> None:
        for member, tenants in self._viewers.items():
            if member is not sender and event.tenant in tenants:
                member.push(EVENT, event)

    def _view(self, member: Member, told: _Viewed) -> None:
        tenants = self._viewers.setdefault(member, set())
        (tenants.add if told.viewed else tenants.discard)(told.tenant)
        self._inform()

    def _inform(self) -> None:
        for member in self._viewers:
            member.push(WATCHED, self._watched())

    def _watched(self) -> frozenset[str]:
        return frozenset().union(*self._viewers.values())


class SharedFeed:
    """The :class:`~leyline_proxy.live.feed.Peers` of one worker's feed."""

    def __init__(self, link: HubLink) -> None:
        self._link = link
        self._watched: frozenset[str] = frozenset()
        link.on(WATCHED, self._watch)

    def connect(self, feed: LiveFeed) -> None:
        """Pass other workers' events on to this worker's feed."""
        self._link.on(EVENT, lambda e: feed.came(e.tenant, e.kind, e.data, e.session, e.updated))

    def wants(self, tenant: str) -> bool:
        return tenant in self._watched

    def publish(self, tenant: str, kind: str, data: bytes, session: str, updated: float) -> None:
        self._link.tell(PUBLISH, _Told(tenant, kind, data, session, updated))

    def viewed(self, tenant: str, viewed: bool) -> None:
        self._link.tell(VIEWED, _Viewed(tenant, viewed))

    def count(self, tenant: str, at: float, tokens: TokenCounts, thinking: tuple[int, int]) -> None:
        self._link.tell(COUNT, _Counted(tenant, at, tokens, thinking))

    async def trend(self, tenant: str) -> list[Step]:
        return await self._link.ask(TREND, tenant)

    def _watch(self, tenants: frozenset[str]) -> None:
        self._watched = tenants
