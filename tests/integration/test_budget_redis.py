"""Budgets in a real Redis: the same counts as in memory, several proxies, and outages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from support.fake_engine import MODEL, FakeEngine, chat_json, proxy_before
from support.redis_server import RedisServer, redis_cluster, redis_server
from support.waiting import until

from leyline_proxy.budgets.book import Book
from leyline_proxy.budgets.redis import RedisBudgetStore
from leyline_proxy.model.budgets import (
    SLOT_S,
    Amount,
    Asked,
    Settlement,
    WindowLimit,
    asked_at,
)
from leyline_proxy.sessions.redis import RedisOptions

CHAT = "/v1/chat/completions"
RED, BLUE = {"authorization": "Bearer kr"}, {"authorization": "Bearer kb"}
TURN = {"model": MODEL, "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 8}
COST = 12
"""Tokens that the scripted engine reports for a turn."""
LIMITS = (WindowLimit("minute", tokens=300, nanos=2 * 10**14), WindowLimit("month", tokens=2000))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis for the tests that don't harm it."""
    with redis_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.mark.parametrize("skew_s", [-86_400, -600, 600, 86_400])
async def test_redis_may_have_another_time(server: RedisServer, skew_s: int) -> None:
    """A clock that is far behind or ahead of Redis's neither ends a window early nor keeps it."""

    def now() -> float:
        return time.time() + skew_s

    store = RedisBudgetStore(RedisOptions(server.url, timeout_s=5), f"skew{skew_s}", now=now)
    limits = (WindowLimit("minute", tokens=100), WindowLimit("month", tokens=10**6))
    asked = asked_at("red", limits, Amount(60), now())
    admitted = [(await store.reserve(asked)).admitted for _ in range(3)]
    await store.settle("red", ended(asked, Amount(50)))
    assert admitted == [True, False, False]
    assert [each.used.tokens for each in await store.usages(asked)] == [50, 50]
    with server.client() as client:
        kept = [client.ttl(key) for key in client.keys(f"skew{skew_s}*")]
    assert len(kept) == 2 and 3500 < min(kept) < 3700 and max(kept) < 32 * 86_400
    await store.aclose()


@pytest.fixture
def fragile(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis that is killed, and finds its data again."""
    with redis_server(tmp_path, "--appendonly", "yes", "--appendfsync", "always") as running:
        yield running


def shared(server: RedisServer, prefix: str, **settings: Any) -> dict[str, Any]:
    """Settings of a proxy that counts in Redis."""
    return {
        "api_keys": ["red:kr", "blue:kb"],
        "session_store": server.url,
        "session_secret": ["a secret of sixteen characters or more"],
        "redis_prefix": prefix,
        "redis_timeout_s": 2.0,
        "budget_store": "redis",
        "log_level": "error",
        **settings,
    }


def own(tokens: int) -> dict[str, Any]:
    """A budget that only the tenant red has."""
    return {"red": {"budgets": [{"window": "month", "tokens": tokens}]}}


async def used(client: httpx.AsyncClient) -> tuple[int, int]:
    """Tokens that red has used, and that it holds."""
    (found,) = (await client.get("/v1/leyline/budgets", headers=RED)).json()["budgets"]
    return found["used"], found["reserved"]


def ended(asked: Asked, real: Amount) -> list[Settlement]:
    """The end of a request."""
    return [Settlement(each, real, asked.amount, asked.lapses) for each in asked.periods]


@pytest.mark.parametrize("seed", range(8))
async def test_redis_counts_as_the_book_does(server: RedisServer, seed: int) -> None:
    """Any sequence of requests gets the same answers, amounts beyond 32 bits included."""
    random, now, book = Random(seed), time.time() + 60, Book()
    store = RedisBudgetStore(RedisOptions(server.url, timeout_s=5), f"book{seed}")
    running: list[Asked] = []
    try:
        for _ in range(80):
            now += random.choice([0, 1, 20, SLOT_S, 12 * SLOT_S] if random.random() < 0.3 else [0])
            tenant = random.choice(["red", "blue"])
            amount = Amount(random.randrange(120), random.randrange(10**14))
            forced = random.random() < 0.1
            asked = asked_at(tenant, LIMITS, amount, now, forced=forced)
            if random.random() < 0.6 or not running:
                found = await store.reserve(asked)
                assert found == book.reserve(asked, now)
                if found.admitted:
                    running.append(asked)
            else:
                gone, real = running.pop(random.randrange(len(running))), amount
                await store.settle(gone.tenant, ended(gone, real))
                book.settle(gone.tenant, ended(gone, real), now)
            assert await store.usages(asked) == book.usages(asked)
    finally:
        await store.aclose()


async def test_entries_name_no_tenant_and_end_with_their_window(server: RedisServer) -> None:
    """Names are digests; entries expire an hour after their windows, those of late charges, too."""
    store = RedisBudgetStore(RedisOptions(server.url, timeout_s=5), "names")
    asked = asked_at("red-and-secret", LIMITS, Amount(5, 5), time.time())
    await store.reserve(asked)
    await store.settle("late-and-secret", [Settlement(each, Amount(4)) for each in asked.periods])
    await store.aclose()
    with server.client() as client:
        names = sorted(client.scan_iter("names:*"))
        for name in names:
            assert b"secret" not in name
            window, begins = name.decode().split(":")[-2:]
            period = next(each for each in asked.periods if each.window == window)
            assert begins == str(period.begins)
            assert client.pexpiretime(name) / 1000 == pytest.approx(period.ends + 3600, abs=60)
    assert len(names) == 2 * len(LIMITS)


async def test_requests_that_come_together_find_a_cold_store(server: RedisServer) -> None:
    """The first connection is made while others wait for it; none is refused."""
    store = RedisBudgetStore(RedisOptions(server.url, timeout_s=5), "cold")
    asked = asked_at("red", LIMITS, Amount(1), time.time())
    found = await asyncio.gather(*(store.reserve(asked) for _ in range(8)))
    await store.aclose()
    assert [each.admitted for each in found] == [True] * 8


async def test_a_cluster_takes_all_windows_in_one_script(tmp_path: Path) -> None:
    """A tenant's entries are in one slot, so that its windows are held together or not at all."""
    with redis_cluster(tmp_path) as servers:
        url = servers[0].url.replace("redis://", "redis+cluster://").removesuffix("/0")
        store = RedisBudgetStore(RedisOptions(url, timeout_s=5, connect_timeout_s=2), "c")
        for tenant in ("red", "blue", "green"):
            asked = asked_at(tenant, LIMITS, Amount(5), time.time())
            assert (await store.reserve(asked)).admitted
            await store.settle(tenant, ended(asked, Amount(3)))
            assert {each.used for each in await store.usages(asked)} == {Amount(3)}
        await store.aclose()


async def test_two_proxies_share_a_budget(server: RedisServer) -> None:
    """Each counts the other's requests; another tenant sees nothing of it."""
    settings = shared(server, "two", tenants=own(3 * COST + 4))
    async with (
        proxy_before(FakeEngine(), **settings) as first,
        proxy_before(FakeEngine(), **settings) as second,
    ):
        codes = [
            (await client.post(CHAT, json=TURN, headers=RED)).status_code
            for client in (first, second, first, second)
        ]
        assert codes[0] == 200
        assert codes[-1] == 429
        assert await used(first) == await used(second) == (codes.count(200) * COST, 0)
        other = await second.post(CHAT, json=TURN, headers=BLUE)
        theirs = await second.get("/v1/leyline/budgets", headers=BLUE)
    assert other.status_code == 200
    assert theirs.json() == {"budgets": [], "complete": True}


async def test_open_admits_and_owes_while_redis_is_down(fragile: RedisServer) -> None:
    """Requests are served by what the proxy knows, and Redis has all of it once it is back."""
    settings = shared(fragile, "open", tenants=own(8 * COST))
    async with proxy_before(FakeEngine(), **settings) as client:
        assert (await client.post(CHAT, json=TURN, headers=RED)).status_code == 200
        fragile.kill()
        down = [(await client.post(CHAT, json=TURN, headers=RED)).status_code for _ in range(8)]
        metrics = (await client.get("/metrics")).text
        known = (await client.get("/v1/leyline/budgets", headers=RED)).json()
        fragile.start()

        async def paid() -> bool:
            # The next request, and every few seconds a task, look for Redis.
            await client.post(CHAT, json=TURN, headers=BLUE)
            await client.get("/metrics")
            return await stored(fragile, "open") == (1 + down.count(200)) * COST

        await until(paid)
        assert (await used(client))[0] == (1 + down.count(200)) * COST
        later = (await client.get("/v1/leyline/budgets", headers=RED)).json()
    assert (known["complete"], later["complete"]) == (False, True)
    assert known["budgets"][0]["used"] == (1 + down.count(200)) * COST
    assert down[0] == 200
    assert down[-1] == 429, "the local count has limits, too"
    assert 'leyline_budget_store_errors_total{result="open"}' in metrics
    assert 'leyline_budget_store_errors_total{result="owed"} 0.0' not in metrics


async def stored(server: RedisServer, prefix: str) -> int:
    """The tokens that Redis has counted, of all tenants."""
    with server.client() as client:
        names = list(client.scan_iter(f"{prefix}:budget:*"))
        return sum(int(client.hget(name, "t") or 0) for name in names)


async def test_a_request_under_way_is_charged_after_an_outage(fragile: RedisServer) -> None:
    """Redis is lost between admission and charge; later it has the charge, and no hold."""
    engine = FakeEngine()
    engine.answers = [chat_json()]
    engine.answers[0].pause_s = 0.5
    settings = shared(fragile, "way", tenants=own(100), budget_store_down="closed")
    async with proxy_before(engine, **settings) as client:
        pending = asyncio.ensure_future(client.post(CHAT, json=TURN, headers=RED))

        async def held() -> bool:
            return (await used(client))[1] > 0

        await until(held)
        fragile.kill()
        assert (await pending).status_code == 200
        fragile.start()

        async def paid() -> bool:
            await client.get("/metrics")
            return await used(client) == (COST, 0) and await stored(fragile, "way") == COST

        await until(paid)


async def test_closed_refuses_while_redis_is_down(fragile: RedisServer) -> None:
    """503 names store and setting; nothing is sent; tenants without budgets are served."""
    engine = FakeEngine()
    settings = shared(fragile, "closed", tenants=own(100), budget_store_down="closed")
    async with proxy_before(engine, **settings) as client:
        assert (await client.post(CHAT, json=TURN, headers=RED)).status_code == 200
        fragile.kill()
        sent = len(engine.bodies)
        refused = await client.post(CHAT, json=TURN, headers=RED)
        assert len(engine.bodies) == sent
        served = await client.post(CHAT, json=TURN, headers=BLUE)
        fragile.start()

        async def back() -> bool:
            return (await client.post(CHAT, json=TURN, headers=RED)).status_code == 200

        await until(back)
        assert (await used(client))[0] == 2 * COST
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (503, "budget_store_unavailable")
    assert "redis" in error["message"]
    assert "budget_store_down" in error["message"]
    assert "retry-after" in refused.headers
    assert served.status_code == 200


async def test_a_redis_that_hangs_delays_a_request_by_no_more_than_its_limits(
    fragile: RedisServer,
) -> None:
    """Connections stay and answers don't come: requests are served all the same."""
    settings = shared(fragile, "hang", tenants=own(100), redis_timeout_s=0.2)
    async with proxy_before(FakeEngine(), **settings) as client:
        fragile.pause()
        try:
            answer = await client.post(CHAT, json=TURN, headers=RED, timeout=20)
        finally:
            fragile.resume()
    assert answer.status_code == 200
