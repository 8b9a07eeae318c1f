"""Admission for all workers: their requests wait in one fair queue."""

from __future__ import annotations

import asyncio
from itertools import count

import msgspec

from ..admission.fair_queue import Arrival, Share
from ..admission.places import Counts, PlaceBook, Rates, Ticket
from .link import HubLink
from .server import Handlers, Member, Part
from .wire import Method, Topic

_Owned = tuple[Member, str, int]
"""A worker, the tenant of its request, and the request's number."""


class _Enter(msgspec.Struct, array_like=True, frozen=True):
    tenant: str
    number: int
    weight: float
    max_running: int | None
    max_waiting: int


class _Leave(msgspec.Struct, array_like=True, frozen=True):
    tenant: str
    number: int


class _Take(msgspec.Struct, array_like=True, frozen=True):
    tenant: str
    per_minute: float


ENTER = Method("places.enter", _Enter, Arrival)
LEAVE = Method("places.leave", _Leave, type(None))
COUNTS = Method("places.counts", str, Counts)
TAKE = Method("places.take", _Take, float)
GRANTED = Topic("places.granted", int)


class HubPlaces(Part):
    """The places of all workers' requests.

    Args:
        places: largest number of requests under way.
    """

    def __init__(self, places: int) -> None:
        self._book: PlaceBook[_Owned] = PlaceBook(places, self._grant)
        self._rates = Rates()
        self._entered: dict[Member, dict[int, str]] = {}
        """Requests of each worker that run or wait: tenants by number."""

    def handlers(self, handlers: Handlers) -> None:
        handlers.add(ENTER, self._enter)
        handlers.add(LEAVE, self._leave)
        handlers.add(COUNTS, lambda _, tenant: self._book.counts(tenant))
        handlers.add(TAKE, lambda _, asked: self._rates.take(asked.tenant, asked.per_minute))

    def left(self, member: Member) -> None:
        """Give the places of a worker's requests to others."""
        for number, tenant in self._entered.pop(member, {}).items():
            self._book.leave(tenant, (member, tenant, number))

    def _enter(self, member: Member, asked: _Enter) -> Arrival:
        share = Share(asked.weight, asked.max_running, asked.max_waiting)
        arrival = self._book.enter(asked.tenant, share, (member, asked.tenant, asked.number))
        if arrival is not Arrival.FULL:
            self._entered.setdefault(member, {})[asked.number] = asked.tenant
        return arrival

    def _leave(self, member: Member, asked: _Leave) -> None:
        if self._entered.get(member, {}).pop(asked.number, None) is not None:
            self._book.leave(asked.tenant, (member, asked.tenant, asked.number))

    def _grant(self, owned: _Owned) -> None:
        owned[0].push(GRANTED, owned[2])


class SharedPlaces:
    """The :class:`~leyline_proxy.admission.places.Places` of one worker."""

    def __init__(self, link: HubLink) -> None:
        self._link = link
        self._numbers = count(1)
        self._entered: dict[Ticket, int] = {}
        self._tickets: dict[int, Ticket] = {}
        link.on(GRANTED, self._granted)

    async def enter(self, tenant: str, share: Share, ticket: Ticket) -> Arrival:
        number = next(self._numbers)
        self._entered[ticket], self._tickets[number] = number, ticket
        asked = _Enter(tenant, number, share.weight, share.max_running, share.max_waiting)
        return await self._link.ask(ENTER, asked)

    def leave(self, tenant: str, ticket: Ticket) -> None:
        number = self._entered.pop(ticket, None)
        if number is not None:
            del self._tickets[number]
            self._link.tell(LEAVE, _Leave(tenant, number))

    async def counts(self, tenant: str) -> Counts:
        return await self._link.ask(COUNTS, tenant)

    async def take(self, tenant: str, per_minute: float) -> float:
        return await self._link.ask(TAKE, _Take(tenant, per_minute))

    def _granted(self, number: int) -> None:
        ticket: asyncio.Future[None] | None = self._tickets.get(number)
        if ticket is not None and not ticket.done():
            ticket.set_result(None)
