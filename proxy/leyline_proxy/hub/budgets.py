"""Budgets for all workers: their requests hold and use the same room."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from ..budgets.book import Book
from ..budgets.owed import OwedSettlements
from ..budgets.store import BudgetStore, BudgetStoreGoneError
from ..model.budgets import Amount, Asked, Reserved, Settlement, Usage, settlements_of
from .link import HubFaultError, HubGoneError, HubLink
from .server import Handlers, Member
from .wire import Method, Topic


class _Settle(msgspec.Struct, array_like=True, frozen=True):
    tenant: str
    settlements: tuple[Settlement, ...]


RESERVE = Method("budgets.reserve", Asked, Reserved)
NOTE = Method("budgets.note", _Settle, type(None))
DIED = Topic("budgets.died", _Settle)
SETTLE = Method("budgets.settle", _Settle, type(None))
USAGES = Method("budgets.usages", Asked, tuple[Usage, ...])


class HubBudgets:
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
        """Add the answers to questions about budgets."""
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
        try:
            return await self._link.ask(RESERVE, asked)
        except (HubGoneError, HubFaultError) as error:
            raise BudgetStoreGoneError from error

    async def settle(self, tenant: str, settlements: Sequence[Settlement]) -> None:
        try:
            await self._link.ask(SETTLE, _Settle(tenant, tuple(settlements)))
        except (HubGoneError, HubFaultError) as error:
            raise BudgetStoreGoneError from error

    async def usages(self, asked: Asked) -> tuple[Usage, ...]:
        try:
            return await self._link.ask(USAGES, asked)
        except (HubGoneError, HubFaultError) as error:
            raise BudgetStoreGoneError from error

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
