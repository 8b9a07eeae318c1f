"""The debts of this process, and what their store knows of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import structlog

from .book import Debt, DebtStore, DebtStoreGoneError, Owner

log = structlog.get_logger("leyline.forget")

_AT_ONCE = 256
"""Sessions whose debts are written together."""


class Debts:
    """Keeps a store of debts equal to what this process carries.

    One write at a time, and always the newest state of a session, so that a payment never overtakes
    the debt of a later demand.

    Args:
        carried: returns the debts of a session that this process carries now.
    """

    def __init__(self, store: DebtStore, carried: Callable[[Owner], Iterable[Debt]]) -> None:
        self._store = store
        self._carried = carried
        self._changed: dict[Owner, None] = {}
        """Sessions of which the store may not know the newest state."""
        self._there: dict[Owner, frozenset[str]] = {}
        """Runs that the store may have, by session."""
        self._one = asyncio.Lock()
        self._unsure = False
        """True if the answer to a question for inheritances was lost."""
        self._down = False

    @property
    def name(self) -> str:
        """Name of the store."""
        return self._store.name

    @property
    def problem(self) -> str | None:
        """Reason that the store doesn't get debts now; None while it does."""
        return f"{self._store.name} is out of reach" if self._down else None

    @property
    def unsaved(self) -> int:
        """Number of sessions with debts that would end with this process."""
        return sum(any(True for _ in self._carried(owner)) for owner in self._changed)

    def changed(self, owner: Owner) -> None:
        """Note that the debts of a session have changed; :meth:`save` writes them."""
        self._changed[owner] = None

    async def save(self) -> None:
        """Write what has changed. Never fails: what the store can't take is written later."""
        async with self._one:
            while self._changed:
                owners = list(self._changed)[:_AT_ONCE]
                if not await self._write(owners):
                    return

    async def inherit(self) -> list[Debt]:
        """Return debts of processes that have gone, which are this one's from now on; after a
        question whose answer was lost, all that the store has for this process."""
        await self.save()
        async with self._one:
            unsure, self._unsure = self._unsure, True
            try:
                found = await self._store.inherit(whole=unsure)
            except DebtStoreGoneError:
                self._failed()
                return []
            self._unsure = False
            self._works()
            if not found.known:
                self._lost()
            for each in found.debts:
                self._there[each.owner] = self._runs(each.owner) | {each.run}
            return list(found.debts)

    async def aclose(self) -> None:
        """Try once more to write what has changed, and leave all debts to others."""
        await self.save()
        if lost := self.unsaved:
            log.error("forgets_lost", store=self._store.name, sessions=lost)
        await self._store.aclose()

    async def _write(self, owners: list[Owner]) -> bool:
        debts, paid = list[Debt](), list[tuple[str, str, str]]()
        wanted = dict[Owner, frozenset[str]]()
        for owner in owners:
            del self._changed[owner]
            own = list(self._carried(owner))
            wanted[owner] = frozenset(each.run for each in own)
            debts += own
            paid += [(*owner, run) for run in self._runs(owner) - wanted[owner]]
            self._there[owner] = self._runs(owner) | wanted[owner]
        try:
            known = await self._store.write(debts, paid)
        except BaseException as error:
            self._changed |= dict.fromkeys(owners)
            if not isinstance(error, DebtStoreGoneError):
                raise
            self._failed()
            return False
        self._works()
        for owner, runs in wanted.items():
            self._there[owner] = runs
            if not runs:
                del self._there[owner]
        if not known:
            self._lost(set(owners))
        return True

    def _runs(self, owner: Owner) -> frozenset[str]:
        return self._there.get(owner, frozenset())

    def _lost(self, but: Iterable[Owner] = ()) -> None:
        """Write everything again, except what has just been written."""
        self._changed |= dict.fromkeys(self._there.keys() - set(but))

    def _works(self) -> None:
        if self._down:
            self._down = False
            log.info("debt_store_up", store=self._store.name)

    def _failed(self) -> None:
        if not self._down:
            self._down = True
            log.warning("debt_store_down", store=self._store.name, unsaved=self.unsaved)
