"""Budgets for all workers: their requests hold and use the same room."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from ..budgets.book import Book
from ..budgets.owed import OwedSettlements
from ..budgets.store import BudgetStoreGoneError
from ..model.budgets import Amount, Asked, Reserved, Settlement, Usage
from .link import HubFaultError, HubGoneError, HubLink
from .server import Handlers, Member
from .wire import Method


class _Settle(msgspec.Struct, array_like=True, frozen=True):
    tenant: str
    settlements: tuple[Settlement, ...]


RESERVE = Method("budgets.reserve", Asked, Reserved)
SETTLE = Method("budgets.settle", _Settle, type(None))
USAGES = Method("budgets.usages", Asked, tuple[Usage, ...])


class HubBudgets:
    """The usage of all workers' requests."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._book = Book()
        self._now = now
        self._held: dict[Member, OwedSettlements] = {}
        """What the requests of each worker hold."""

    def handlers(self, handlers: Handlers) -> None:
        """Add the answers to questions about budgets."""
        handlers.add(RESERVE, self._reserve)
        handlers.add(SETTLE, self._settle)
        handlers.add(USAGES, lambda _, asked: self._book.usages(asked))

    def left(self, member: Member) -> None:
        """End what the requests of a worker held that has gone."""
        held, now = self._held.pop(member, OwedSettlements()), self._now()
        for tenant in held.tenants():
            self._book.settle(tenant, held.take(tenant, now), now)

    def _reserve(self, member: Member, asked: Asked) -> Reserved:
        now = self._now()
        reserved = self._book.reserve(asked, now)
        if reserved.admitted:
            held = [
                Settlement(each, Amount(), asked.amount, asked.lapses) for each in asked.periods
            ]
            self._held.setdefault(member, OwedSettlements()).add(asked.tenant, held, now)
        return reserved

    def _settle(self, member: Member, word: _Settle) -> None:
        now = self._now()
        self._book.settle(word.tenant, word.settlements, now)
        ended = [
            each._replace(used=Amount(), held=Amount(-each.held.tokens, -each.held.nanos))
            for each in word.settlements
        ]
        if member in self._held:
            self._held[member].add(word.tenant, ended, now)


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
