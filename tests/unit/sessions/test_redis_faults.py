"""Unplanned faults of Redis, or of a session: a turn is served all the same."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.redis_server import RedisServer, free_port, redis_cluster, redis_server
from support.sessions import blank, chain_of, history, turn_change

from leyline_proxy.sessions.redis import RedisLink, RedisOptions, RedisSessionStore, Seal

SECRET = "a secret of sixteen characters or more"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One Redis for the module."""
    with redis_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


def store_at(url: str) -> RedisSessionStore:
    """A proxy's store without supervision."""
    link = RedisLink(RedisOptions(url, connect_timeout_s=0.3, timeout_s=0.3))
    return RedisSessionStore(link, ttl_s=60, seal=Seal([SECRET]))


async def turn(store: RedisSessionStore, name: str = "a", turns: int = 2) -> None:
    """All that a turn asks of a store; none of it raises."""
    messages = history(turns, name)
    await store.matches("t", "", chain_of(messages), 3)
    await store.get("t", name)
    await store.open_turn("t", name, "t1")
    await store.update("t", name, turn_change(name, messages), chain_of(messages), ends="t1")
    await store.sessions("t")
    await store.count()


@pytest.mark.parametrize("listens", [False, True])
async def test_a_cluster_that_is_none_keeps_nobody_from_starting(
    server: RedisServer, *, listens: bool
) -> None:
    """With no listener, or a server outside any cluster, the store says so, and turns are
    served."""
    port = server.port if listens else free_port()
    store = store_at(f"redis+cluster://127.0.0.1:{port}")
    try:
        await store.connect()
        assert store.problem is not None and "127.0.0.1" not in store.problem
        await turn(store)
    finally:
        await store.aclose()


async def test_a_cluster_that_dies_keeps_nobody_waiting(tmp_path: Path) -> None:
    """Without one server or all of them no turn fails, and the look for a return continues."""
    with redis_cluster(tmp_path) as servers:
        store = store_at(f"redis+cluster://127.0.0.1:{servers[0].port}")
        try:
            await store.connect()
            assert store.problem is None
            await turn(store)
            looks = asyncio.create_task(store.run())
            for dying in (servers[1:2], servers):
                for each in dying:
                    each.kill()
                until = time.monotonic() + 3.5  # longer than a cluster needs to notice
                while time.monotonic() < until:
                    for name in "abcdef":
                        await turn(store, name)
                    await asyncio.sleep(0.02)
                assert store.problem is not None
            assert not looks.done()
            looks.cancel()
            await asyncio.wait((looks,))
        finally:
            await store.aclose()


async def test_a_session_that_cannot_be_written_keeps_its_account(server: RedisServer) -> None:
    """Content that no request could bring costs the sources, as in a session that is too long."""
    store = store_at(server.url)
    try:
        await store.connect()
        messages = history(2, "a")
        change = turn_change("a", messages)
        await store.update(
            "t", "a", lambda found: replace(change(found), policy_states={"0": {"x": object()}})
        )
    finally:
        await store.aclose()
    other = store_at(server.url)
    try:
        await other.connect()
        session = await other.get("t", "a")
        assert session is not None and session.next_index == 1
        assert not session.turns and session.unnamed == 1
    finally:
        await other.aclose()


async def test_an_entry_of_another_kind_keeps_no_proxy_from_its_sign_of_life(
    server: RedisServer,
) -> None:
    """A loss that Redis won't take is one of all sessions, not the end of all that follows."""
    store = store_at(server.url)
    try:
        await store.connect()
        with server.client() as client:
            before = client.hget("leyline:state", "epoch")
            client.set(store._keys.session("t", "bad"), b"not a hash")
        await store.update("t", "bad", lambda found: found or blank("bad"))
        assert store.problem is None
        await store.connect()
        with server.client() as client:
            assert client.hget("leyline:state", "epoch") != before
        assert not store._losses
    finally:
        await store.aclose()


async def test_a_cancelled_caller_ends_though_its_client_swallows_it(server: RedisServer) -> None:
    """A task that asks Redis again and again would continue for ever, and its proxy never stop."""
    link = RedisLink(RedisOptions(server.url, connect_timeout_s=5, timeout_s=5))
    link.close_circuit(await link.look())

    async def swallowed(_: object) -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return "an answer"
        return "another"

    async def for_ever() -> None:
        while True:
            await link.call(lambda client: client.ping())
            await asyncio.sleep(0)

    asking = asyncio.create_task(link.call(swallowed))
    beating = [asyncio.create_task(for_ever()) for _ in range(200)]
    for task in (*beating, asking):
        for _ in range(7):
            await asyncio.sleep(0)
        task.cancel()
    _, stuck = await asyncio.wait((*beating, asking), timeout=20)
    assert not stuck
    assert asking.cancelled()
    await link.aclose()
