"""Evicted texts in a Redis that goes away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from parts_kit import LIMITS, OLD, RED, part, store_over
from support.clock import Clock
from support.redis_server import RedisServer, redis_server
from support.waiting import until

from leyline_proxy.parts import redis as redis_parts
from leyline_proxy.parts.limits import FLOOR_S, PartLimits, PartStoreError
from leyline_proxy.parts.recallable_parts import RecallableParts
from leyline_proxy.parts.redis import RedisSpace
from leyline_proxy.parts.sealing import PartSeal
from leyline_proxy.parts.store import PartStore
from leyline_proxy.sessions.redis import RedisOptions

TEXT = part("the text")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis of the test's own."""
    with redis_server(tmp_path) as running:
        yield running


def opened(server: RedisServer, timeout_s: float = 1.0) -> PartStore:
    """A store in it."""
    options = RedisOptions(server.url, timeout_s=timeout_s)
    return store_over(RedisSpace(options, "leyline"), Clock(time.time()))


async def test_redis_is_killed_and_comes_back(server: RedisServer) -> None:
    """While Redis is away every operation says so, at once; a forget is owed, hides its session's
    texts, and is paid when Redis is back."""
    store = opened(server)
    parts = RecallableParts(store, retry_s=0.05)
    await store.check()
    assert parts.problem is None
    await parts.put(RED, [TEXT])
    server.kill()
    await parts.forget(*RED, "", 0)
    assert parts.owed == 1
    assert parts.problem is not None
    assert "out of reach" in parts.problem
    begun = time.perf_counter()
    for _ in range(20):
        with pytest.raises(PartStoreError, match="out of reach"):
            await parts.get(RED, [TEXT.address], demands=0)
    assert time.perf_counter() - begun < 1
    # It comes back with what it had, as one with a disk does.
    server.start()
    await store.check()
    assert store.problem is None
    await store.put(RED, [TEXT])
    assert (await store.get(RED, [TEXT.address])).parts
    running = asyncio.create_task(parts.run())
    await until(lambda: not parts.owed)
    running.cancel()
    assert (await parts.get(RED, [TEXT.address], demands=0)).forgotten == {TEXT.address}
    (place,) = await parts.left(*RED, 1)
    assert (place.place, place.survivors, place.unscanned) == ("parts", 0, "")
    await store.aclose()


async def test_those_who_ask_all_the_time_find_redis_back(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that is asked more often than once a second looks for Redis once a second."""
    now = 1000.0
    monkeypatch.setattr(redis_parts, "time", SimpleNamespace(monotonic=lambda: now))
    store = opened(server)
    await store.put(RED, [TEXT])
    server.kill()
    with pytest.raises(PartStoreError):
        await store.get(RED, [TEXT.address])
    server.start()
    for _ in range(3):
        now += 0.3
        with pytest.raises(PartStoreError):
            await store.get(RED, [TEXT.address])
    now += 0.3
    assert not (await store.get(RED, [TEXT.address])).parts, "it came back empty"
    await store.aclose()


async def test_a_redis_that_hangs_costs_one_wait(server: RedisServer) -> None:
    """A Redis that doesn't answer costs the time limit once; the next operations fail at once."""
    store = opened(server, timeout_s=0.2)
    await store.put(RED, [TEXT])
    server.pause()
    begun = time.perf_counter()
    for _ in range(10):
        with pytest.raises(PartStoreError):
            await store.get(RED, [TEXT.address])
    assert time.perf_counter() - begun < 1.5
    server.resume()
    await store.check()
    assert (await store.get(RED, [TEXT.address])).parts
    await store.aclose()


async def test_redis_drops_texts_by_itself(server: RedisServer) -> None:
    """Each entry has an expiry in Redis: a tenant that never comes back leaves nothing."""
    store = opened(server)
    await store.put(RED, [TEXT])
    await store.forget(("red", "t"), turn="", demands=0)
    with server.client() as client:
        lives = {key: client.pttl(key) / 1000 for key in client.scan_iter()}
    assert len(lives) == 6
    assert min(lives.values()) > LIMITS.ttl_s - 10
    assert max(lives.values()) <= LIMITS.ttl_s + 2 * FLOOR_S
    texts = [key for key in lives if key.endswith(b":p") and b":old:" not in key]
    assert [lives[key] <= LIMITS.ttl_s for key in texts if b":size:" not in key] == [True]
    await store.aclose()


async def test_the_sizes_in_redis_stay_right(server: RedisServer) -> None:
    """After renewals, removals and trims, the sum of a tenant's bytes is that of its entries."""
    limits = PartLimits(ttl_s=100, tenant_bytes=9_000)
    space = RedisSpace(RedisOptions(server.url), "leyline")
    clock = Clock(time.time())
    store = PartStore(space, PartSeal((OLD,)), limits, clock=clock)
    for number in range(12):
        clock.now += 1
        await store.put(("red", f"s{number % 3}"), [part(str(number % 5) * 1500)])
    await store.forget(("red", "s1"), turn="", demands=0)
    with server.client() as client:
        for kind in (b"p", b"m"):
            shelves = [k for k in client.scan_iter(b"*:" + kind) if client.type(k) == b"hash"]
            (sizes,) = [key for key in shelves if b":size:" in key]
            known = {k: int(v) for k, v in client.hgetall(sizes).items()}
            total = known.pop(b"")
            held = [client.hvals(key) for key in shelves if key != sizes]
            assert total == sum(known.values()) == sum(len(e) for each in held for e in each)
            assert client.zcard(sizes.replace(b":size:", b":old:")) == len(known)
    await store.aclose()


async def test_a_refused_command_is_an_error_without_a_key(server: RedisServer) -> None:
    """A Redis without memory refuses a text: the operation fails with a message that names
    nothing, and ends when there is room."""
    store = opened(server)
    await store.put(RED, [TEXT])
    with server.client() as client:
        client.config_set("maxmemory", 1)
        with pytest.raises(
            PartStoreError, match=r"^Redis (refused a command|is out of reach \(\w+\))$"
        ):
            await store.put(RED, [part("more")])
        assert store.problem is not None
        client.config_set("maxmemory", 0)
    await store.check()
    await store.put(RED, [part("more")])
    assert store.problem is None
    await store.aclose()
