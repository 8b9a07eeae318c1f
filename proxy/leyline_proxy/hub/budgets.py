"""Budgets for all workers: their requests hold and use the same room, and reports cover all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from ..budgets import Budgets
from ..budgets.book import Book
from ..budgets.owed import OwedSettlements
from ..budgets.store import BudgetStore, BudgetStoreGoneError
from ..model.budgets import (
    Amount,
    Asked,
    Counted,
    Reserved,
    Settlement,
    Standing,
    StoreState,
    Usage,
    settlements_of,
    standings,
    together,
)
from ..tenants import Tenant
from .fleet import Fleet
from .link import HubLink, unreachable_as
from .server import Handlers, Member, Part
from .wire import A, Method, Q, Topic

_PATIENCE_S = 1.0


class _Settle(msgspec.Struct, array_like=True, frozen=True):
    tenant: str
    settlements: tuple[Settlement, ...]


RESERVE = Method("budgets.reserve", Asked, Reserved)
SETTLE = Method("budgets.settle", _Settle, type(None))
USAGES = Method("budgets.usages", Asked, tuple[Usage, ...])
NOTE = Method("budgets.note", _Settle, type(None))
DIED = Topic("budgets.died", _Settle)
COUNTED = Method("budgets.counted", Asked, tuple[Counted, ...])
STATE = Method("budgets.state", type(None), StoreState)


class HubBudgets(Part):
    """The usage of all workers' requests, and what they hold, also in another store.

    A worker that dies leaves requests of which nobody knows what they used. Another worker charges
    what they held."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._book = Book()
        self._now = now
        self._held: dict[Member, OwedSettlements] = {}
        """What the requests of each worker hold."""
        self._members: dict[Member, None] = {}
        self._left: list[_Settle] = []
        """Holds that wait for a worker which charges them."""

    def handlers(self, handlers: Handlers) -> None:
        handlers.add(RESERVE, self._reserve)
        handlers.add(SETTLE, self._settle)
        handlers.add(USAGES, lambda _, asked: self._book.usages(asked))
        handlers.add(NOTE, self._note)

    def joined(self, member: Member) -> None:
        """Let a worker charge for those that have died."""
        self._members[member] = None
        left, self._left = self._left, []
        for holds in left:
            self._inherit(member, holds)

    def left(self, member: Member) -> None:
        """Have what the requests of a worker held that has gone be charged."""
        self._members.pop(member, None)
        held, now = self._held.pop(member, OwedSettlements()), self._now()
        for tenant in held.tenants():
            holds = _Settle(tenant, tuple(held.take(tenant, now)))
            if other := next(iter(self._members), None):
                self._inherit(other, holds)
            else:
                self._left.append(holds)

    def _inherit(self, member: Member, holds: _Settle) -> None:
        """Have a worker charge holds of another; they are its own until it has."""
        self._note(member, holds)
        charged = tuple(each._replace(used=each.held) for each in holds.settlements)
        member.push(DIED, _Settle(holds.tenant, charged))

    def _reserve(self, member: Member, asked: Asked) -> Reserved:
        now = self._now()
        reserved = self._book.reserve(asked, now)
        if reserved.admitted:
            self._note(member, _begun(asked))
        return reserved

    def _settle(self, member: Member, word: _Settle) -> None:
        self._book.settle(word.tenant, word.settlements, self._now())
        if member in self._held:
            self._note(member, _ended(word))

    def _note(self, member: Member, word: _Settle) -> None:
        held = self._held.setdefault(member, OwedSettlements())
        held.add(word.tenant, word.settlements, self._now())


def _begun(asked: Asked) -> _Settle:
    """Return the holds of an admitted request."""
    return _Settle(asked.tenant, tuple(settlements_of(asked, Amount())))


def _ended(word: _Settle) -> _Settle:
    """Return the ends of holds, as negative ones."""
    ended = (
        each._replace(used=Amount(), held=Amount(-each.held.tokens, -each.held.nanos))
        for each in word.settlements
        if each.lapses
    )
    return _Settle(word.tenant, tuple(ended))


class SharedBudgetStore:
    """The :class:`~leyline_proxy.budgets.store.BudgetStore` of one worker."""

    name = "hub"

    def __init__(self, link: HubLink) -> None:
        self._link = link

    async def reserve(self, asked: Asked) -> Reserved:
        with unreachable_as(BudgetStoreGoneError):
            return await self._link.ask(RESERVE, asked)

    async def settle(self, tenant: str, settlements: Sequence[Settlement]) -> None:
        with unreachable_as(BudgetStoreGoneError):
            await self._link.ask(SETTLE, _Settle(tenant, tuple(settlements)))

    async def usages(self, asked: Asked) -> tuple[Usage, ...]:
        with unreachable_as(BudgetStoreGoneError):
            return await self._link.ask(USAGES, asked)

    async def aclose(self) -> None:
        """Do nothing: the worker closes the link."""


class NotedBudgetStore:
    """A store outside the proxy, of whose holds the hub knows in case that this worker dies."""

    def __init__(self, store: BudgetStore, link: HubLink) -> None:
        self._store = store
        self._link = link

    @property
    def name(self) -> str:
        return self._store.name

    async def reserve(self, asked: Asked) -> Reserved:
        reserved = await self._store.reserve(asked)
        if reserved.admitted:
            self._link.tell(NOTE, _begun(asked))
        return reserved

    async def settle(self, tenant: str, settlements: Sequence[Settlement]) -> None:
        await self._store.settle(tenant, settlements)
        self._link.tell(NOTE, _ended(_Settle(tenant, tuple(settlements))))

    async def usages(self, asked: Asked) -> tuple[Usage, ...]:
        return await self._store.usages(asked)

    async def aclose(self) -> None:
        """Close all connections of the store."""
        await self._store.aclose()


class BudgetsOfAll:
    """The :class:`~leyline_proxy.budgets.BudgetReports` of one worker and of all others."""

    def __init__(self, own: Budgets, fleet: Fleet) -> None:
        self._own = own
        self._fleet = fleet
        fleet.follow(COUNTED, self._counted_here)
        fleet.follow(STATE, lambda _: own.state())

    async def standings(self, tenant: Tenant) -> list[Standing]:
        if not tenant.limits.budgets:
            return []
        asked = self._own.asked(tenant)
        usages = await self._own.read(asked)
        if usages is None:
            found = await self._all(COUNTED, asked)
            usages = together(found or [self._own.counted(asked)])
        return standings(asked, usages)

    async def state(self) -> StoreState:
        found = await self._all(STATE, None) or [await self._own.state()]
        problems = (each.problem for each in found if each.problem is not None)
        return StoreState(next(problems, None), sum(each.owed for each in found))

    async def _all(self, order: Method[Q, A], question: Q) -> list[A]:
        """Return all workers' answers; none if one of them is busy for too long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                return await self._fleet.everyone(order, question)
        return []

    async def _counted_here(self, asked: Asked) -> tuple[Counted, ...]:
        return self._own.counted(asked)
