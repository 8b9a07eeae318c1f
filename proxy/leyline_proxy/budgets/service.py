"""Budgets of tenants: room is held before a request is sent, and what it used is charged after."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import structlog

from ..model.budgets import (
    Amount,
    Asked,
    Counted,
    Reserved,
    Settlement,
    Standing,
    StoreState,
    Usage,
    asked_at,
    fits,
    settlements_of,
    shortage,
    standings,
    together,
)
from ..model.paid import Price
from ..telemetry.metrics import Metrics
from ..tenants import Tenant
from .book import Book
from .errors import BudgetExceededError, BudgetStoreDownError, UnpricedModelError, rate_headers
from .owed import OwedSettlements
from .store import BudgetStore, BudgetStoreGoneError

log = structlog.get_logger("leyline.budgets")

_OBSERVE_S = 5.0

_NANOS_OF_PRICE = 1000
"""A price per million tokens, in billionths of the currency per token."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Room that a request holds in its tenant's budgets."""

    asked: Asked
    headers: dict[str, str]
    """What is left, as headers of an answer."""
    local: bool = False
    """True if the store was down, so that only this process knows of it."""


class Budgets:
    """Admits requests by their tenants' budgets, and counts what they use.

    Args:
        open_when_down: True to admit requests while the store can't be reached, by what this
            process knows.
        price_of: returns a model's price; None if it has none.
        now: seconds since 1970.
    """

    def __init__(
        self,
        store: BudgetStore,
        metrics: Metrics,
        *,
        open_when_down: bool,
        currency: str,
        price_of: Callable[[str], Price | None],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._open = open_when_down
        self._price_of = price_of
        self._now = now
        self.currency = currency
        self._known = Book()
        """What this process knows of the store, and counts itself while that is down."""
        self._owed = OwedSettlements()
        self._down = False
        self._shown: dict[tuple[str, str, str], Standing] = {}
        self._settling: set[asyncio.Task[None]] = set()

    async def state(self) -> StoreState:
        """Return the state of the store, as this process last found it."""
        problem = f"{self._store.name} is out of reach" if self._down else None
        return StoreState(problem, len(self._owed))

    def amount(
        self, tenant: Tenant, model: str, *, prefilled: int, cached: int, generated: int
    ) -> Amount:
        """Return what tokens count.

        Raises:
            UnpricedModelError: the tenant has a money budget, and the model has no price.
        """
        tokens = prefilled + cached + generated
        if all(limit.nanos is None for limit in tenant.limits.budgets):
            return Amount(tokens)
        price = self._price_of(model)
        if price is None:
            raise UnpricedModelError
        rates = zip(
            (prefilled, cached, generated),
            (price.prefilled, price.cached, price.generated),
            strict=True,
        )
        return Amount(tokens, round(sum(count * each * _NANOS_OF_PRICE for count, each in rates)))

    async def check(self, tenant: Tenant) -> None:
        """Refuse a tenant early that has used up a budget, as far as this process knows.

        Raises:
            BudgetExceededError: the store confirms it.
        """
        if not tenant.limits.budgets:
            return
        asked = asked_at(tenant.name, tenant.limits.budgets, Amount(1, 1), self._now())
        known = [usage._replace(held=Amount()) for usage in self._known.usages(asked)]
        if fits(asked, known):
            return
        try:
            usages = await self._store.usages(asked)
        except BudgetStoreGoneError:
            return  # the reservation decides
        self._learn(asked, usages)
        settled = [usage._replace(held=Amount()) for usage in usages]
        if not fits(asked, settled):
            raise self._refused(asked, settled)

    async def reserve(
        self, tenant: Tenant, amount: Amount, *, forced: bool = False
    ) -> Reservation | None:
        """Hold room for a request; None if its tenant has no budgets.

        Args:
            forced: True for the rest of a request that has begun, which no budget cuts off.

        Raises:
            BudgetExceededError: a budget has no room.
            BudgetStoreDownError: the store is down, and requests are refused then.
        """
        if not tenant.limits.budgets:
            return None
        now = self._now()
        asked = asked_at(tenant.name, tenant.limits.budgets, amount, now, forced=forced)
        local = False
        await self._pay()
        try:
            reserved = await self._reserved(asked)
        except BudgetStoreGoneError:
            self._failed()
            self._metrics.budget_store_errors.labels("open" if self._open else "closed").inc()
            if not self._open and not forced:
                raise BudgetStoreDownError(self._store.name) from None
            reserved, local = self._known.reserve(asked, now), True
        else:
            self._learn(asked, reserved.usages)
        if not reserved.admitted:
            raise self._refused(asked, reserved.usages)
        found = standings(asked, reserved.usages)
        self._show(asked.tenant, found)
        return Reservation(asked, rate_headers(found, now), local)

    async def settle(self, reservation: Reservation, used: Amount) -> None:
        """End a hold, and charge what was used. Never fails: what the store can't take is owed."""
        asked = reservation.asked
        ended = settlements_of(asked, used)
        if reservation.local:
            self._known.settle(asked.tenant, ended, self._now())
            ended = [Settlement(period, used) for period in asked.periods]
        await self._settle(asked, ended, counted=reservation.local)

    async def charge(self, tenant: Tenant, used: Amount) -> None:
        """Charge what was used without a hold. Never fails, as :meth:`settle`."""
        if not tenant.limits.budgets:
            return
        asked = asked_at(tenant.name, tenant.limits.budgets, Amount(), self._now())
        await self._settle(asked, [Settlement(period, used) for period in asked.periods])

    def take_over(self, tenant: str, ended: Sequence[Settlement]) -> None:
        """Charge for requests of another process that has died. Never fails, as :meth:`settle`."""
        self._metrics.budget_estimates.labels("died").inc()
        self._known.settle(tenant, _without_holds(ended), self._now())
        self._beside(self._given(tenant, ended))

    async def standings(self, tenant: Tenant) -> list[Standing]:
        """Return the state of a tenant's budgets, as far as known while the store is down."""
        if not tenant.limits.budgets:
            return []
        asked = self.asked(tenant)
        usages = await self.read(asked)
        return standings(asked, together([self.counted(asked)]) if usages is None else usages)

    def asked(self, tenant: Tenant) -> Asked:
        """Return the question for a tenant's usage now."""
        return asked_at(tenant.name, tenant.limits.budgets, Amount(), self._now())

    async def read(self, asked: Asked) -> Sequence[Usage] | None:
        """Return the usage by period that the store has counted; None while it is down."""
        try:
            usages = await self._store.usages(asked)
        except BudgetStoreGoneError:
            self._failed()
            return None
        self._learn(asked, usages)
        return usages

    def counted(self, asked: Asked) -> tuple[Counted, ...]:
        """Return what this process has counted by period, for the time that the store is down."""
        found = []
        for period, usage in zip(asked.periods, self._known.usages(asked), strict=True):
            owed = self._owed.used(asked.tenant, period)
            found.append(Counted(usage.used.minus(owed), owed, usage.held))
        return tuple(found)

    async def observe(self) -> None:
        """Pay what is owed, look if the store is back, and show ended windows as unused."""
        await self._pay()
        now = self._now()
        if self._down:
            await self.read(asked_at("", (), Amount(), now))
        for key, standing in [*self._shown.items()]:
            if standing.period.ends <= now:
                self._metrics.budget_used.labels(*key).set(0)
                del self._shown[key]

    async def run(self) -> None:
        """Call :meth:`observe` at intervals, forever."""
        while True:
            await asyncio.sleep(_OBSERVE_S)
            await self.observe()

    async def aclose(self) -> None:
        """Try once more to pay what is owed, and close the store."""
        if self._settling:
            await asyncio.wait(self._settling)
        await self._pay()
        if self._owed:
            log.error("budget_charges_lost", store=self._store.name, sums=len(self._owed))
        await self._store.aclose()

    async def _settle(
        self, asked: Asked, settlements: Sequence[Settlement], *, counted: bool = False
    ) -> None:
        """Settle in this process and in the store, even if the request is cancelled meanwhile.

        Args:
            counted: True if this process has counted it.
        """
        if not counted:
            self._known.settle(asked.tenant, _without_holds(settlements), self._now())
        if any(each.used != Amount() for each in settlements):
            self._show(asked.tenant, standings(asked, self._known.usages(asked)))
        await asyncio.shield(self._beside(self._given(asked.tenant, settlements)))

    def _beside(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run what must not end with its caller."""
        task = asyncio.create_task(work)
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)
        return task

    async def _reserved(self, asked: Asked) -> Reserved:
        """Ask the store for a hold, and end it if the caller is cancelled meanwhile."""
        asking = asyncio.ensure_future(self._store.reserve(asked))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            self._beside(self._withdraw(asked, asking))
            raise

    async def _withdraw(self, asked: Asked, asking: asyncio.Future[Reserved]) -> None:
        with suppress(BudgetStoreGoneError):
            if (await asking).admitted:
                await self._given(asked.tenant, settlements_of(asked, Amount()))

    async def _given(self, tenant: str, settlements: Sequence[Settlement]) -> None:
        """Give settlements to the store, or owe them."""
        try:
            await self._store.settle(tenant, settlements)
        except BudgetStoreGoneError:
            self._failed()
            self._metrics.budget_store_errors.labels("owed").inc()
            self._owed.add(tenant, settlements, self._now())

    async def _pay(self) -> None:
        """Give the store what it is owed."""
        for tenant in self._owed.tenants():
            owed = self._owed.take(tenant, self._now())
            try:
                await self._store.settle(tenant, owed)
            except BaseException as error:
                self._owed.add(tenant, owed, self._now())
                if not isinstance(error, BudgetStoreGoneError):
                    raise
                self._failed()
                return

    def _learn(self, asked: Asked, usages: Sequence[Usage]) -> None:
        """Take over what the store knows, which is up."""
        if self._down:
            self._down = False
            log.info("budget_store_up", store=self._store.name)
        for period, usage in zip(asked.periods, usages, strict=True):
            owed = self._owed.used(asked.tenant, period)
            self._known.learn(asked.tenant, period, usage.used.plus(owed))

    def _failed(self) -> None:
        if not self._down:
            self._down = True
            log.warning("budget_store_down", store=self._store.name, admits=self._open)

    def _refused(self, asked: Asked, usages: Sequence[Usage]) -> BudgetExceededError:
        found, short = standings(asked, usages), shortage(asked, usages)
        assert short is not None  # noqa: S101 - it was refused
        self._show(asked.tenant, found)
        self._metrics.limited.labels(asked.tenant, BudgetExceededError.code).inc()
        return BudgetExceededError(
            short, found, asked.amount, currency=self.currency, now=self._now()
        )

    def _show(self, tenant: str, found: list[Standing]) -> None:
        for each in found:
            key = (tenant, each.period.window, each.unit)
            self._shown[key] = each
            self._metrics.budget_used.labels(*key).set(each.used / each.limit)


def _without_holds(settlements: Sequence[Settlement]) -> list[Settlement]:
    """Return what was used, for counts without the holds."""
    return [each._replace(held=Amount(), lapses=0) for each in settlements]
