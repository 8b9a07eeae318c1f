"""Admission and charges: outages, cancelled requests, headers and words."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import replace

import pytest
from support.clock import Clock
from support.waiting import until

from leyline_proxy.budgets import Budgets, Reservation
from leyline_proxy.budgets.errors import (
    BudgetExceededError,
    BudgetStoreDownError,
    UnpricedModelError,
)
from leyline_proxy.budgets.store import BudgetStoreGoneError, MemoryBudgetStore
from leyline_proxy.model.budgets import NANOS, Amount, Asked, Reserved, Settlement, WindowLimit
from leyline_proxy.model.paid import Price
from leyline_proxy.settings import Settings
from leyline_proxy.telemetry.metrics import Metrics
from leyline_proxy.tenants import Tenant
from leyline_proxy.tenants.tenant import TenantLimits, build_tenant

NOON = 1_764_244_800.0
"""A day's middle, in UTC."""
DAY = WindowLimit("day", tokens=100)


class Store(MemoryBudgetStore):
    """A store that can be out of reach, or slow."""

    def __init__(self, now: Clock) -> None:
        super().__init__(now)
        self.down = False
        self.slow = asyncio.Event()
        self.slow.set()
        self.calls = 0

    async def _reach(self) -> None:
        self.calls += 1
        await self.slow.wait()
        if self.down:
            raise BudgetStoreGoneError

    async def reserve(self, asked: Asked) -> Reserved:
        """Reserve, if it is there."""
        await self._reach()
        return await super().reserve(asked)

    async def settle(self, tenant: str, settlements: Sequence[Settlement]) -> None:
        """Settle, if it is there."""
        await self._reach()
        await super().settle(tenant, settlements)

    async def usages(self, asked: Asked) -> tuple[object, ...]:  # type: ignore[override]
        """Look, if it is there."""
        await self._reach()
        return await super().usages(asked)


class Kit:
    """Budgets over such a store."""

    def __init__(self, *, open_when_down: bool = True, price: Price | None = None) -> None:
        self.clock = Clock(NOON)
        self.store = Store(self.clock)
        self.metrics = Metrics()
        self.budgets = self.made(open_when_down=open_when_down, price=price)

    def made(self, *, open_when_down: bool = True, price: Price | None = None) -> Budgets:
        """Another process's budgets over the same store."""
        return Budgets(
            self.store,
            self.metrics,
            open_when_down=open_when_down,
            currency="EUR",
            price_of=lambda model: price if model == "big" else None,
            now=self.clock,
        )

    async def cancelled(self, work: Awaitable[object]) -> None:
        """Begin some work, and cancel it while it waits for the store."""
        calls = self.store.calls
        self.store.slow.clear()
        task = asyncio.ensure_future(work)
        await until(lambda: self.store.calls > calls)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self.store.slow.set()

    async def spent(self, owner: Tenant) -> int:
        """Tokens that the store has counted."""
        return (await self.budgets.standings(owner))[0].used


def tenant(*limits: WindowLimit, name: str = "red") -> Tenant:
    """A tenant with these budgets."""
    return replace(build_tenant(name, Settings()), limits=TenantLimits(budgets=limits))


def taken(found: Reservation | None) -> Reservation:
    """The reservation of a tenant that has budgets."""
    assert found is not None
    return found


async def test_a_tenant_without_budgets_asks_no_store() -> None:
    """It costs nothing, and is never refused."""
    kit, free = Kit(), tenant()
    await kit.budgets.check(free)
    assert await kit.budgets.reserve(free, Amount(10**9)) is None
    await kit.budgets.charge(free, Amount(10**9))
    assert await kit.budgets.standings(free) == []
    assert kit.store.calls == 0


async def test_an_early_check_costs_no_question_until_a_budget_is_used_up() -> None:
    """Then the store confirms it; a limit that was given back there admits again."""
    kit, red = Kit(), tenant(DAY)
    held = taken(await kit.budgets.reserve(red, Amount(100)))
    await kit.budgets.check(red)  # held, but not used
    await kit.budgets.settle(held, Amount(100))
    calls = kit.store.calls
    with pytest.raises(BudgetExceededError, match="is used up"):
        await kit.budgets.check(red)
    assert kit.store.calls == calls + 1
    kit.store = kit.budgets._store = Store(kit.clock)  # an operator emptied it
    await kit.budgets.check(red)


async def test_another_tenant_of_the_same_budget_has_its_own() -> None:
    """One that is used up refuses only its own tenant."""
    kit, red, blue = Kit(), tenant(DAY), tenant(DAY, name="blue")
    await kit.budgets.settle(taken(await kit.budgets.reserve(red, Amount(100))), Amount(100))
    with pytest.raises(BudgetExceededError):
        await kit.budgets.reserve(red, Amount(1))
    assert taken(await kit.budgets.reserve(blue, Amount(100))).asked.tenant == "blue"


async def test_the_open_fallback_begins_with_what_was_known() -> None:
    """A process that knows of 90 used tokens admits 10 more while the store is down."""
    kit, red = Kit(), tenant(DAY)
    await kit.budgets.settle(taken(await kit.budgets.reserve(red, Amount(90))), Amount(90))
    kit.store.down = True
    with pytest.raises(BudgetExceededError):
        await kit.budgets.reserve(red, Amount(11))
    held = taken(await kit.budgets.reserve(red, Amount(10)))
    with pytest.raises(BudgetExceededError):
        await kit.budgets.reserve(red, Amount(1))
    await kit.budgets.settle(held, Amount(4))
    assert (await kit.budgets.state()).owed == 1
    assert (await kit.budgets.state()).problem == "memory is out of reach"
    assert taken(await kit.budgets.reserve(red, Amount(6))).local
    kit.store.down = False
    await kit.budgets.observe()
    assert ((await kit.budgets.state()).owed, await kit.spent(red)) == (0, 94)


async def test_what_is_owed_counts_before_it_is_paid() -> None:
    """The first answer of a store that is back doesn't make a process forget its own charges."""
    kit, red = Kit(), tenant(DAY)
    held = taken(await kit.budgets.reserve(red, Amount(60)))
    kit.store.down = True
    await kit.budgets.settle(held, Amount(60))
    kit.store.down = False
    again = taken(await kit.budgets.reserve(red, Amount(40)))
    assert again.headers["x-ratelimit-remaining-tokens"] == "0"
    assert await kit.budgets.state() == (None, 0)
    assert await kit.spent(red) == 60


async def test_a_process_without_requests_sees_that_the_store_is_back() -> None:
    """Its state doesn't wait for a request; until then it reports the outage."""
    kit, red = Kit(), tenant(DAY)
    kit.store.down = True
    assert await kit.spent(red) == 0
    await kit.budgets.observe()
    assert (await kit.budgets.state()).problem == "memory is out of reach"
    kit.store.down = False
    await kit.budgets.observe()
    assert (await kit.budgets.state()).problem is None


async def test_closed_refuses_but_never_cuts_off() -> None:
    """The rest of a request that has begun continues, and is charged later."""
    kit, red = Kit(open_when_down=False), tenant(DAY)
    kit.store.down = True
    with pytest.raises(BudgetStoreDownError, match="budget_store_down"):
        await kit.budgets.reserve(red, Amount(1))
    held = taken(await kit.budgets.reserve(red, Amount(1), forced=True))
    await kit.budgets.settle(held, Amount(5))
    kit.store.down = False
    await kit.budgets.observe()
    assert await kit.spent(red) == 5


async def test_a_store_that_fails_again_is_owed_all_the_same() -> None:
    """A payment that doesn't arrive is repeated; what concerns an ended window isn't."""
    kit, red = Kit(), tenant(DAY)
    kit.store.down = True
    for _ in range(3):
        await kit.budgets.settle(taken(await kit.budgets.reserve(red, Amount(5))), Amount(2))
        await kit.budgets.observe()
    assert (await kit.budgets.state()).owed == 1
    kit.store.down = False
    await kit.budgets.observe()
    assert await kit.spent(red) == 6
    kit.store.down = True
    await kit.budgets.charge(red, Amount(7))
    kit.clock.now += 86_400
    kit.store.down = False
    await kit.budgets.observe()
    assert ((await kit.budgets.state()).owed, await kit.spent(red)) == (0, 0)


async def test_a_cancelled_request_is_charged_once() -> None:
    """Its client leaves while the store is asked: the charge arrives, and isn't repeated."""
    kit, red = Kit(), tenant(DAY)
    held = taken(await kit.budgets.reserve(red, Amount(50)))
    await kit.cancelled(kit.budgets.settle(held, Amount(20)))
    await kit.budgets.aclose()
    (state,) = await kit.budgets.standings(red)
    assert (state.used, state.held, (await kit.budgets.state()).owed) == (20, 0, 0)


async def test_a_cancelled_payment_stays_owed() -> None:
    """A request that pays for others, and is cancelled then, loses nothing."""
    kit, red = Kit(), tenant(DAY)
    kit.store.down = True
    await kit.budgets.charge(red, Amount(20))
    kit.store.down = False
    kit.store.slow.clear()
    paying = asyncio.ensure_future(kit.budgets.observe())
    await asyncio.sleep(0)
    paying.cancel()
    await asyncio.gather(paying, return_exceptions=True)
    assert (await kit.budgets.state()).owed == 1
    kit.store.slow.set()
    await kit.budgets.aclose()
    assert ((await kit.budgets.state()).owed, await kit.spent(red)) == (0, 20)


async def test_a_cancelled_question_for_room_holds_nothing() -> None:
    """Its client leaves while the store answers: the room is given back."""
    kit, red = Kit(), tenant(DAY)
    await kit.cancelled(kit.budgets.reserve(red, Amount(50)))

    async def nothing_held() -> bool:
        (state,) = await kit.budgets.standings(red)
        return (state.used, state.held) == (0, 0)

    await until(lambda: kit.store.calls > 1)
    await until(nothing_held)
    await kit.budgets.aclose()


async def test_charges_taken_over_count_while_the_store_is_down() -> None:
    """An heir refuses what doesn't fit beside what it charges for a process that died."""
    kit, red = Kit(), tenant(DAY)
    held = taken(await kit.budgets.reserve(red, Amount(30)))
    await kit.budgets.settle(held, Amount(30))
    kit.store.down = True
    asked = kit.budgets.asked(red)
    ended = [Settlement(each, Amount(60), Amount(60), asked.lapses) for each in asked.periods]
    kit.budgets.take_over("red", ended)
    await until(lambda: kit.store.calls > 2)
    with pytest.raises(BudgetExceededError):
        await kit.budgets.reserve(red, Amount(11))
    (state,) = await kit.budgets.standings(red)
    assert (state.used, state.held) == (90, 0)
    kit.store.down = False
    await kit.budgets.observe()
    assert await kit.spent(red) == 90


async def test_processes_without_the_store_hold_a_budget_each() -> None:
    """The bound of ``open``: each process admits no more than the budget."""
    kit, red = Kit(), tenant(DAY)
    kit.store.down = True
    for budgets in (kit.budgets, kit.made()):
        await budgets.settle(taken(await budgets.reserve(red, Amount(100))), Amount(100))
        with pytest.raises(BudgetExceededError):
            await budgets.reserve(red, Amount(1))


async def test_a_process_learns_what_others_used() -> None:
    """Its own request shows it their charges, on which it relies once the store is down."""
    kit, red = Kit(), tenant(DAY)
    await kit.budgets.settle(taken(await kit.budgets.reserve(red, Amount(90))), Amount(90))
    other = kit.made()
    await other.settle(taken(await other.reserve(red, Amount(1))), Amount(1))
    kit.store.down = True
    with pytest.raises(BudgetExceededError):
        await other.reserve(red, Amount(10))
    assert await other.reserve(red, Amount(9)) is not None


async def test_money_is_counted_in_billionths() -> None:
    """Each kind of token at its price; a model without one is refused only for money."""
    kit = Kit(price=Price("EUR", 2.0, 0.25, 8.0))
    rich = tenant(WindowLimit("month", nanos=NANOS))
    counts = {"prefilled": 1000, "cached": 400, "generated": 10}
    amount = kit.budgets.amount(rich, "big", **counts)
    assert amount == Amount(1410, 1000 * 2000 + 400 * 250 + 10 * 8000)
    with pytest.raises(UnpricedModelError):
        kit.budgets.amount(rich, "small", **counts)
    assert kit.budgets.amount(tenant(DAY), "small", **counts) == Amount(1410)
    one = kit.budgets.amount(rich, "big", prefilled=0, cached=1, generated=0)
    assert one.nanos == 250


async def test_refusals_name_budget_need_and_reset() -> None:
    """Used up, too small for this request, and held by others differ, and so does the advice."""
    kit, red = Kit(), tenant(DAY, WindowLimit("month", nanos=5 * NANOS))
    with pytest.raises(BudgetExceededError, match="100 tokens per day is smaller") as whole:
        await kit.budgets.reserve(red, Amount(101))
    held = taken(await kit.budgets.reserve(red, Amount(60, NANOS)))
    with pytest.raises(BudgetExceededError, match="try again when one has ended") as busy:
        await kit.budgets.reserve(red, Amount(41))
    await kit.budgets.settle(held, Amount(60, 4 * NANOS))
    with pytest.raises(BudgetExceededError, match=r"has 40 tokens left.*may need 41") as late:
        await kit.budgets.reserve(red, Amount(41))
    with pytest.raises(BudgetExceededError, match=r"5 EUR per month has 1 EUR left.* 2 EUR"):
        await kit.budgets.reserve(red, Amount(1, 2 * NANOS))
    assert whole.value.headers["x-should-retry"] == "false"
    assert "retry-after" not in whole.value.headers
    assert busy.value.headers["retry-after"] == "2"
    assert "x-should-retry" not in busy.value.headers
    assert late.value.headers["retry-after"] == "43200"
    assert late.value.headers["x-should-retry"] == "false"
    assert late.value.headers["x-ratelimit-reset-tokens"] == "12h0m0s"
    assert late.value.headers["x-ratelimit-remaining-tokens"] == "40"
    assert late.value.headers["anthropic-ratelimit-tokens-reset"].endswith("T00:00:00Z")
    assert late.value.members["budget"] == {
        "window": "day",
        "unit": "tokens",
        "limit": 100,
        "used": 60,
        "reserved": 0,
        "remaining": 40,
        "resets_at": late.value.headers["anthropic-ratelimit-tokens-reset"],
    }


async def test_a_minute_is_worth_a_retry() -> None:
    """A window that ends soon says when, and lets the SDKs wait for it."""
    kit, red = Kit(), tenant(WindowLimit("minute", tokens=10))
    kit.clock.now += 18.5
    await kit.budgets.charge(red, Amount(10))
    with pytest.raises(BudgetExceededError) as refused:
        await kit.budgets.reserve(red, Amount(1))
    assert refused.value.headers["retry-after"] == "42"
    assert "x-should-retry" not in refused.value.headers
    kit.clock.now += 41.5
    assert await kit.budgets.reserve(red, Amount(10)) is not None


async def test_the_gauge_falls_when_its_window_ends() -> None:
    """A tenant that asks for nothing more isn't shown as exhausted for ever."""
    kit, red = Kit(), tenant(DAY)

    def shown() -> float | None:
        labels = {"tenant": "red", "window": "day", "unit": "tokens"}
        return kit.metrics.registry.get_sample_value("leyline_budget_used_ratio", labels)

    await kit.budgets.settle(taken(await kit.budgets.reserve(red, Amount(95))), Amount(95))
    assert shown() == 0.95
    await kit.budgets.observe()
    assert shown() == 0.95
    kit.clock.now += 43_200
    await kit.budgets.observe()
    assert shown() == 0
