"""Budgets of several workers: one count, and no room is lost with a worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from support.hubs import hub, link
from support.waiting import until

from leyline_proxy.budgets import Budgets
from leyline_proxy.budgets.book import Book
from leyline_proxy.budgets.store import BudgetStore, BudgetStoreGoneError, MemoryBudgetStore
from leyline_proxy.hub import budgets as hub_budgets
from leyline_proxy.hub.budgets import (
    DIED,
    BudgetsOfAll,
    HubBudgets,
    NotedBudgetStore,
    SharedBudgetStore,
)
from leyline_proxy.hub.fleet import Fleet, HubFleet, connected
from leyline_proxy.hub.link import HubLink
from leyline_proxy.model.budgets import (
    Amount,
    Asked,
    Reserved,
    Settlement,
    Usage,
    WindowLimit,
    asked_at,
)
from leyline_proxy.settings import Settings
from leyline_proxy.telemetry.metrics import Metrics
from leyline_proxy.tenants.tenant import build_tenant

LIMITS = (WindowLimit("hour", tokens=200), WindowLimit("month", tokens=300, nanos=10**18))


def ended(asked: Asked, used: Amount) -> list[Settlement]:
    """The end of a request."""
    return [Settlement(each, used, asked.amount, asked.lapses) for each in asked.periods]


LIMIT = WindowLimit("month", tokens=300)


def fleet(budgets: HubBudgets) -> HubFleet:
    """The hub's side of the workers, who charge for one another."""
    return HubFleet(
        claims=dict,
        joined=budgets.joined,
        ready=lambda *_: None,
        gone=id,
        counted=lambda *_: None,
    )


@asynccontextmanager
async def worker(path: Path, number: int) -> AsyncIterator[HubLink]:
    """A worker's link that has said hello."""
    joined = HubLink(path, number, "a secret of the tests")
    async with connected(joined):
        yield joined


class Heir:
    """Charges by a store what dead workers held.

    Args:
        link: a worker's.
    """

    def __init__(self, link: HubLink, store: BudgetStore) -> None:
        self.words: list[tuple[str, Sequence[Settlement]]] = []
        self._store = store
        self._tasks: set[asyncio.Task[None]] = set()
        link.on(DIED, lambda word: self._charge(word.tenant, word.settlements))

    def _charge(self, tenant: str, settlements: Sequence[Settlement]) -> None:
        self.words.append((tenant, settlements))
        self._tasks.add(asyncio.create_task(self._store.settle(tenant, settlements)))


class Outage(MemoryBudgetStore):
    """A store of several processes that can be out of reach."""

    down = False

    async def reserve(self, asked: Asked) -> Reserved:
        """Reserve, if it is there."""
        self._reach()
        return await super().reserve(asked)

    async def settle(self, tenant: str, settlements: Sequence[Settlement]) -> None:
        """Settle, if it is there."""
        self._reach()
        await super().settle(tenant, settlements)

    async def usages(self, asked: Asked) -> tuple[Usage, ...]:
        """Look, if it is there."""
        self._reach()
        return await super().usages(asked)

    def _reach(self) -> None:
        if self.down:
            raise BudgetStoreGoneError


async def test_reports_cover_all_workers_while_the_store_is_down(tmp_path: Path) -> None:
    """Any worker reports what all have used and hold, above what any of them last learnt."""
    store, red = Outage(), build_tenant("red", Settings())
    red = replace(red, limits=replace(red.limits, budgets=(LIMIT,)))
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(hub(tmp_path / "hub", fleet(HubBudgets())))
        workers: list[tuple[Budgets, BudgetsOfAll]] = []
        for number in range(3):
            joined = await stack.enter_async_context(worker(tmp_path / "hub", number))
            side = Fleet(joined, drain=lambda *_: None)
            own = Budgets(
                store, Metrics(), open_when_down=True, currency="EUR", price_of=lambda _: None
            )
            workers.append((own, BudgetsOfAll(own, side)))
        for tokens, (own, _) in zip((10, 20, 30), workers, strict=True):
            held = await own.reserve(red, Amount(tokens))
            assert held is not None
            await own.settle(held, Amount(tokens))
        store.down = True
        for own, _ in workers:
            held = await own.reserve(red, Amount(5))
            assert held is not None
            await own.settle(held, Amount(4))
        assert await workers[0][0].reserve(red, Amount(7)) is not None
        for _, reports in workers:
            (found,) = await reports.standings(red)
            # The last worker learnt of all 60; the three used 4 each since.
            assert (found.used, found.held, found.remaining) == (72, 7, 221)
            assert await reports.state() == ("memory is out of reach", 3)
        store.down = False
        for own, _ in workers:
            await own.observe()
        (found,) = await workers[0][1].standings(red)
        assert found.used == 72
        assert await workers[1][1].state() == (None, 0)


async def test_a_busy_worker_delays_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its answer, a worker reports what it knows itself."""
    monkeypatch.setattr(hub_budgets, "_PATIENCE_S", 0.05)
    store, red = Outage(), build_tenant("red", Settings())
    red = replace(red, limits=replace(red.limits, budgets=(LIMIT,)))
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(hub(tmp_path / "hub", fleet(HubBudgets())))
        await stack.enter_async_context(worker(tmp_path / "hub", 0))  # follows no orders
        joined = await stack.enter_async_context(worker(tmp_path / "hub", 1))
        own = Budgets(
            store, Metrics(), open_when_down=True, currency="EUR", price_of=lambda _: None
        )
        reports = BudgetsOfAll(own, Fleet(joined, drain=lambda *_: None))
        store.down = True
        held = await own.reserve(red, Amount(5))
        assert held is not None
        await own.settle(held, Amount(4))
        (found,) = await reports.standings(red)
        assert (found.used, await reports.state()) == (4, ("memory is out of reach", 1))


@pytest.mark.parametrize("seed", range(6))
async def test_workers_count_together(tmp_path: Path, seed: int) -> None:
    """Any sequence from three workers gets the answers of one book; the dead are charged what they
    held, and hold nothing."""
    random, now, book = Random(seed), time.time(), Book()
    async with AsyncExitStack() as stack:
        shared = HubBudgets(lambda: now)
        await stack.enter_async_context(hub(tmp_path / "hub", shared, fleet(shared)))
        links = [await stack.enter_async_context(worker(tmp_path / "hub", n)) for n in range(3)]
        stores = {each.index: SharedBudgetStore(each) for each in links}
        heirs = [Heir(each, stores[each.index]) for each in links]
        running: list[tuple[int, Asked]] = []
        for _ in range(60):
            act, tenant = random.random(), random.choice(["red", "blue"])
            asked = asked_at(tenant, LIMITS, Amount(random.randrange(90), 10**15), now)
            index = random.choice([*stores])
            if act < 0.6:
                found = await stores[index].reserve(asked)
                assert found == book.reserve(asked, now)
                if found.admitted:
                    running.append((index, asked))
            elif act < 0.95 and running:
                index, gone = running.pop(random.randrange(len(running)))
                await stores[index].settle(gone.tenant, ended(gone, Amount(3, 5)))
                book.settle(gone.tenant, ended(gone, Amount(3, 5)), now)
            elif len(stores) > 1:
                del stores[index]
                await links[index].aclose()
                for owner, gone in running:
                    if owner == index:
                        book.settle(gone.tenant, ended(gone, gone.amount), now)
                running = [each for each in running if each[0] != index]
                one = next(iter(stores.values()))

                async def agree(one: SharedBudgetStore = one) -> bool:
                    names = [asked_at(name, LIMITS, Amount(), now) for name in ("red", "blue")]
                    return all([await one.usages(each) == book.usages(each) for each in names])

                await until(agree)
    del heirs


async def test_another_store_is_charged_for_a_worker_that_died(tmp_path: Path) -> None:
    """A request that ended is charged once; without another worker, the next one charges."""
    store, budgets = MemoryBudgetStore(), HubBudgets()
    now = time.time()

    async def usage(tenant: str) -> tuple[Amount, Amount]:
        (found,) = await store.usages(asked_at(tenant, (LIMIT,), Amount(), now))
        return found

    async with AsyncExitStack() as stack:
        await stack.enter_async_context(hub(tmp_path / "hub", budgets, fleet(budgets)))
        first = await stack.enter_async_context(worker(tmp_path / "hub", 0))
        noted = NotedBudgetStore(store, first)
        whole, lost, other = (
            asked_at(tenant, (LIMIT,), Amount(amount), now)
            for tenant, amount in (("red", 30), ("red", 40), ("blue", 50))
        )
        for asked in (whole, lost, other):
            assert (await noted.reserve(asked)).admitted
        assert not (await noted.reserve(whole._replace(amount=Amount(10**6)))).admitted
        await noted.settle("red", ended(whole, Amount(7)))
        await noted.settle("red", [Settlement(each, Amount(1)) for each in whole.periods])
        second = await stack.enter_async_context(worker(tmp_path / "hub", 1))
        heir = Heir(second, NotedBudgetStore(store, second))
        await first.aclose()
        await until(lambda: len(heir.words) == 2)
        assert await usage("red") == (Amount(7 + 1 + 40), Amount())
        assert await usage("blue") == (Amount(50), Amount())
        await NotedBudgetStore(store, second).reserve(other)
        await second.aclose()
        third = HubLink(tmp_path / "hub", 2, "a secret of the tests")
        late = Heir(third, store)
        await stack.enter_async_context(connected(third))
        await until(lambda: len(late.words) == 1)
        assert await usage("blue") == (Amount(100), Amount())


async def test_a_worker_without_a_hub_reports_it(tmp_path: Path) -> None:
    """Every operation fails by the store's own error."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(hub(tmp_path / "hub", HubBudgets()))
        store = SharedBudgetStore(await stack.enter_async_context(link(tmp_path / "hub")))
        asked = asked_at("red", LIMITS, Amount(1), time.time())
        assert (await store.reserve(asked)).admitted
        await server.aclose()
        for operation in (
            lambda: store.reserve(asked),
            lambda: store.settle("red", ended(asked, Amount(1))),
            lambda: store.usages(asked),
        ):
            with pytest.raises(BudgetStoreGoneError):
                await operation()
