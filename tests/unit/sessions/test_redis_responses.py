"""Stored responses in Redis: as in memory, encrypted, and gone where Redis is gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from support.redis_server import RedisServer, redis_server

from leyline_proxy.model.stored_response import StoredResponse
from leyline_proxy.sessions.redis import RedisLink, RedisOptions, RedisResponseStore, Seal
from leyline_proxy.sessions.stored_responses import (
    MemoryResponseStore,
    ResponseShelf,
    ResponseStore,
)
from leyline_proxy.settings import Settings
from leyline_proxy.wiring.stores import build_stores

SECRET = "a secret of sixteen characters or more"
TEXT = "ZEBRA-7351"

Opener = Callable[..., ResponseStore]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis of the test's own."""
    with redis_server(tmp_path) as running:
        yield running


@pytest.fixture(params=["memory", "redis"])
async def opener(request: pytest.FixtureRequest) -> AsyncIterator[Opener]:
    """Opens stores of one kind."""
    links: list[RedisLink] = []
    if request.param == "redis":
        link = RedisLink(RedisOptions(request.getfixturevalue("server").url))
        link.close_circuit(await link.look())
        links.append(link)

    def open_store(ttl_s: float = 60.0, most: int = 100) -> ResponseStore:
        if not links:
            shelf = ResponseShelf(max_responses=most, max_bytes=1 << 20, ttl_s=ttl_s)
            return MemoryResponseStore(shelf)
        return RedisResponseStore(links[0], ttl_s=ttl_s, seal=Seal([SECRET]), max_responses=most)

    yield open_store
    for link in links:
        await link.aclose()


def response(name: str, text: str = TEXT) -> StoredResponse:
    """A response with text in its request and its answer."""
    items = [{"id": "i1", "type": "message", "content": text}]
    return StoredResponse(id=name, session="s-1", input=items, response={"output": items})


async def test_a_response_is_kept_until_it_is_deleted(opener: Opener) -> None:
    """A stored response is read by its tenant alone, and its deletion is reported once."""
    store = opener()
    assert await store.get("t", "r1") is None
    await store.put("t", "r1", response("r1"))
    await store.put("t", "r1", response("r1", "again"))
    assert await store.get("t", "r1") == response("r1", "again")
    assert await store.get("other", "r1") is None
    assert not await store.delete("other", "r1")
    assert await store.delete("t", "r1")
    assert not await store.delete("t", "r1")
    assert await store.get("t", "r1") is None


async def test_what_is_used_stays(opener: Opener) -> None:
    """The time to live counts from the last use."""
    store = opener(ttl_s=1.5)
    for name in ("used", "left"):
        await store.put("t", name, response(name))
    await asyncio.sleep(1.0)
    assert await store.get("t", "used") is not None
    await asyncio.sleep(1.0)
    assert await store.get("t", "left") is None
    assert await store.get("t", "used") is not None


async def test_the_oldest_go_first(opener: Opener) -> None:
    """Beyond the bound those go that were used longest ago; a bound of none keeps none."""
    store = opener(most=2)
    for name in ("a", "b"):
        await store.put("t", name, response(name))
        await asyncio.sleep(0.01)
    await store.get("t", "a")
    await asyncio.sleep(0.01)
    await store.put("t", "c", response("c"))
    kept = [name for name in "abc" if await store.get("t", name) is not None]
    assert kept == ["a", "c"]
    none = opener(most=0)
    await none.put("t", "d", response("d"))
    assert await none.get("t", "d") is None


async def test_one_tenant_pushes_out_no_other(opener: Opener) -> None:
    """The tenant that holds the most loses its own oldest; deleted and ended ones count no more."""
    store = opener(most=4)
    await store.put("blue", "b", response("b"))
    for name in "acdefg":
        await store.put("red", name, response(name))
        await asyncio.sleep(0.005)
    assert await store.get("blue", "b") is not None
    assert [name for name in "acdefg" if await store.get("red", name)] == ["e", "f", "g"]
    for name in "efg":
        assert await store.delete("red", name)
    for name in "hij":
        await store.put("blue", name, response(name))
    assert [name for name in "bhij" if await store.get("blue", name)] == ["b", "h", "i", "j"]


async def test_text_is_encrypted_and_damage_is_a_miss(server: RedisServer) -> None:
    """Nothing in Redis shows what was said, and what was changed there isn't believed."""
    settings = Settings(session_store=server.url, session_secret=[SECRET])
    sessions, store, _ = build_stores(settings)
    await sessions.connect()
    await store.put("t", "r1", response("r1"))
    await store.put("t", "r2", response("r2"))
    with server.client() as client:
        values = {key: client.get(key) for key in client.keys("leyline:r:*")}
        assert len(values) == 2
        assert not any(TEXT.encode() in value for value in values.values())
        assert not any(b"r1" in key for key in values)
        first, second = values
        client.set(first, values[second])
        client.set(second, values[second][:-1] + b"x")
    assert await store.get("t", "r1") is None
    assert await store.get("t", "r2") is None
    await sessions.aclose()


async def test_without_a_key_responses_stay_in_memory(server: RedisServer) -> None:
    """They are text through and through, so that Redis gets none of them."""
    sessions, store, _ = build_stores(Settings(session_store=server.url, hints_secret="h"))
    await sessions.connect()
    await store.put("t", "r1", response("r1"))
    assert await store.get("t", "r1") == response("r1")
    with server.client() as client:
        assert client.keys("leyline:r:*") == []
    await sessions.aclose()
    with pytest.raises(ValueError, match="key"):
        RedisResponseStore(RedisLink(RedisOptions(server.url)), ttl_s=1, seal=Seal())


async def test_nobody_waits_for_a_redis_that_is_gone(server: RedisServer) -> None:
    """Nothing is kept or known then, at once; what was stored is there again later."""
    settings = Settings(session_store=server.url, session_secret=[SECRET])
    sessions, store, _ = build_stores(settings)
    await sessions.connect()
    await store.put("t", "r1", response("r1"))
    server.pause()
    await store.get("t", "r1")
    started = time.monotonic()
    for _ in range(20):
        await store.put("t", "r2", response("r2"))
        assert await store.get("t", "r1") is None
        assert not await store.delete("t", "r1")
    assert time.monotonic() - started < 0.5
    server.resume()
    await sessions.connect()
    assert await store.get("t", "r1") == response("r1")
    await sessions.aclose()


async def test_a_sessions_responses_go_from_a_turn_on(opener: Opener) -> None:
    """Those of the turn and of later ones, also one that doesn't say its turn; of no other session,
    tenant or earlier turn."""
    store = opener()

    async def put(tenant: str, name: str, session: str, turn: int | None) -> None:
        account = {} if turn is None else {"leyline": {"turn_index": turn}}
        kept = StoredResponse(id=name, session=session, response={"output": [], **account})
        await store.put(tenant, name, kept)

    async def left() -> list[str]:
        names = [("t", f"r{number}") for number in range(5)] + [("t", "q"), ("u", "r3")]
        return [name for tenant, name in names if await store.get(tenant, name) is not None]

    for number in range(4):
        await put("t", f"r{number}", "s-1", number)
    await put("t", "r4", "s-1", None)
    await put("t", "q", "s-2", 3)
    await put("u", "r3", "s-1", 3)
    assert await store.delete_from("t", "s-1", 2) == 3
    assert await left() == ["r0", "r1", "q", "r3"]
    assert await store.delete_from("t", "s-1", 2) == 0


async def test_use_keeps_a_response_in_reach_of_its_session(opener: Opener) -> None:
    """A response that can be read can be found by its session's name."""
    store = opener(ttl_s=0.6)
    await store.put("t", "r1", response("r1"))
    for _ in range(4):
        await asyncio.sleep(0.3)
        assert await store.get("t", "r1") is not None
    assert await store.delete_from("t", "s-1", 0) == 1
