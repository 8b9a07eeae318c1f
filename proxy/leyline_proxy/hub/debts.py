"""Debts of all workers: one that dies leaves its debts to the others."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ..debts import Debt, DebtBook, DebtKey, DebtStoreGoneError, Inherited
from .link import HubLink, unreachable_as
from .server import Handlers, Member, Part
from .wire import Method


class _Write(msgspec.Struct, array_like=True, frozen=True):
    debts: tuple[Debt, ...]
    paid: tuple[DebtKey, ...]


WRITE = Method("debts.write", _Write, type(None))
INHERIT = Method("debts.inherit", type(None), Inherited)


class HubDebts(Part):
    """The debts of all workers; the next one that asks inherits those of a worker that has gone."""

    def __init__(self) -> None:
        self._book = DebtBook()

    def handlers(self, handlers: Handlers) -> None:
        handlers.add(WRITE, lambda member, word: self._book.write(member, word.debts, word.paid))
        handlers.add(INHERIT, lambda member, _: self._book.inherit(member))

    def left(self, member: Member) -> None:
        """Keep the debts of a worker that has gone for the others."""
        self._book.leave(member)


class SharedDebtStore:
    """The :class:`~leyline_proxy.debts.DebtStore` of one worker."""

    name = "hub"

    def __init__(self, link: HubLink) -> None:
        self._link = link

    async def write(self, debts: Sequence[Debt], paid: Sequence[DebtKey]) -> bool:
        with unreachable_as(DebtStoreGoneError):
            await self._link.ask(WRITE, _Write(tuple(debts), tuple(paid)))
        return True

    async def inherit(self, *, whole: bool = False) -> Inherited:
        with unreachable_as(DebtStoreGoneError):
            return await self._link.ask(INHERIT, None)

    async def aclose(self) -> None:
        """Do nothing: the worker closes the link, and the hub keeps its debts."""
