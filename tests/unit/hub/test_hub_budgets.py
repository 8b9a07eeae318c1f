"""Budgets of several workers: one count, and no room is lost with a worker."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random

import pytest
from support.hubs import hub, link
from support.waiting import until

from leyline_proxy.budgets.book import Book
from leyline_proxy.budgets.store import BudgetStoreGoneError
from leyline_proxy.hub.budgets import HubBudgets, SharedBudgetStore
from leyline_proxy.model.budgets import Amount, Asked, Settlement, WindowLimit, asked_at

LIMITS = (WindowLimit("hour", tokens=200), WindowLimit("month", tokens=300, nanos=10**18))


def ended(asked: Asked, used: Amount) -> list[Settlement]:
    """The end of a request."""
    return [Settlement(each, used, asked.amount, asked.lapses) for each in asked.periods]


@pytest.mark.parametrize("seed", range(6))
async def test_workers_count_together(tmp_path: Path, seed: int) -> None:
    """Any sequence from three workers gets the answers of one book; the dead hold nothing."""
    random, now, book = Random(seed), time.time(), Book()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(hub(tmp_path / "hub", HubBudgets(lambda: now)))
        links = [await stack.enter_async_context(link(tmp_path / "hub", n)) for n in range(3)]
        stores = {each.index: SharedBudgetStore(each) for each in links}
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
                        book.settle(gone.tenant, ended(gone, Amount()), now)
                running = [each for each in running if each[0] != index]
                one = next(iter(stores.values()))

                async def agree(one: SharedBudgetStore = one) -> bool:
                    names = [asked_at(name, LIMITS, Amount(), now) for name in ("red", "blue")]
                    return all([await one.usages(each) == book.usages(each) for each in names])

                await until(agree)


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
