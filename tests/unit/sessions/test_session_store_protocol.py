"""The common behaviour of all session stores: in memory, shared by workers, in Redis with and
without a key, in a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.hubs import hub, link
from support.redis_server import RedisServer, redis_cluster, redis_server
from support.sessions import after_turn, blank, chain_of, history, turn_change

from leyline_proxy.hub.sessions import HubSessions, SharedSessions
from leyline_proxy.model.history import HistoryMatch
from leyline_proxy.model.session import Session
from leyline_proxy.sessions import MemorySessionStore, SessionStore
from leyline_proxy.sessions.redis import RedisLink, RedisOptions, RedisSessionStore, Seal

SECRET = "a secret of sixteen characters or more"
KINDS = ["memory", "workers", "redis", "sealed", "cluster"]

Opener = Callable[..., Awaitable[SessionStore]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One Redis for the module."""
    with redis_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a cluster of three."""
    with redis_cluster(tmp_path_factory.mktemp("cluster")) as servers:
        yield f"redis+cluster://127.0.0.1:{servers[0].port}"


@asynccontextmanager
async def in_redis(url: str, prefix: str, **options: float) -> AsyncIterator[RedisSessionStore]:
    """A store that is looked after as a proxy does."""
    sealed = bool(options.pop("sealed", True))
    store = RedisSessionStore(
        RedisLink(RedisOptions(url, timeout_s=2.0, connect_timeout_s=2.0)),
        ttl_s=options.get("ttl_s", 60.0),
        max_sessions=int(options["max_sessions"]) if "max_sessions" in options else None,
        seal=Seal([SECRET] if sealed else []),
        prefix=prefix,
    )
    await store.connect()
    assert store.problem is None
    try:
        yield store
    finally:
        await store.aclose()


@pytest.fixture(params=KINDS)
async def opener(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[Callable[..., Awaitable[SessionStore]]]:
    """Opens stores of one kind."""
    kind, opened, hubs = request.param, list[Any](), list[Any]()
    prefix = tmp_path.name  # another's entries are not seen

    async def open_store(**options: float) -> SessionStore:
        if kind == "memory":
            given = {"max_sessions": 100, "ttl_s": 60.0, **options}
            return MemorySessionStore(
                max_sessions=int(given["max_sessions"]), ttl_s=given["ttl_s"], idle_pack_s=1e9
            )
        if kind == "workers":
            if not hubs:
                given = {"max_sessions": 100, "ttl_s": 60.0, **options}
                sessions = HubSessions(
                    max_sessions=int(given["max_sessions"]),
                    max_bytes=1 << 30,
                    ttl_s=given["ttl_s"],
                )
                hubs.append(hub(tmp_path / "hub", sessions))
                opened.append(hubs[0])
                await hubs[0].__aenter__()
            joined = link(tmp_path / "hub")
            opened.append(joined)
            return SharedSessions(await joined.__aenter__(), max_cached_bytes=1 << 20)
        if kind == "cluster":
            url = request.getfixturevalue("cluster")
        else:
            url = request.getfixturevalue("server").url
        context = in_redis(url, prefix, sealed=float(kind != "redis"), **options)
        store = await context.__aenter__()
        opened.append(context)
        return store

    yield open_store
    for context in reversed(opened):
        await context.__aexit__(None, None, None)


@pytest.fixture
async def store(opener: Opener) -> SessionStore:
    """A store of one kind."""
    return await opener()


async def put(store: SessionStore, name: str, turns: int, **options: str) -> Session:
    """One more turn of the conversation ``name``."""
    messages = history(turns, task=options.pop("task", name))
    change = turn_change(name, messages, **options)
    return await store.update(options.get("tenant", "t"), name, change, chain_of(messages))


async def test_a_session_is_found_as_it_was_written(store: SessionStore) -> None:
    """A look-up by the id finds the session that an update returned."""
    assert await store.get("t", "a") is None
    written = await put(store, "a", 1)
    written = await put(store, "a", 2)
    assert await store.get("t", "a") == written
    assert len(written.turns) == 2


async def test_tenants_never_meet(store: SessionStore) -> None:
    """Neither ids nor histories nor lists cross from one tenant to another."""
    await put(store, "a", 2, tenant="red")
    chain = chain_of(history(2, "a"))
    assert await store.get("blue", "a") is None
    assert await store.matches("blue", "", chain, 3) == ()
    assert await store.sessions("blue") == ()
    assert await store.matches("red", "", chain, 3) != ()


async def test_a_continued_history_is_found(store: SessionStore) -> None:
    """The session whose whole history is a prefix counts, however much has been added."""
    await put(store, "a", 1)
    longer = chain_of(history(20, "a"))
    assert await store.matches("t", "", longer, 3) == (HistoryMatch("a", 4, whole=True),)
    longest = chain_of(history(400, "a"))
    assert await store.matches("t", "", longest, 3) == (HistoryMatch("a", 4, whole=True),)


async def test_an_edited_history_is_found(store: SessionStore) -> None:
    """A history that was edited after task and first answer is found with its length in common."""
    await put(store, "a", 3)
    edited = history(4, "a")
    edited[5] = {**edited[5], "content": "cleared"}
    assert await store.matches("t", "", chain_of(edited), 3) == (HistoryMatch("a", 5, whole=False),)
    other = history(4, "another task")
    assert await store.matches("t", "", chain_of(other), 3) == ()


async def test_the_longest_continued_history_wins(store: SessionStore) -> None:
    """Of several branches the one that is continued is whole, and comes with no shorter one."""
    await put(store, "a", 2, task="same")
    await put(store, "b", 3, task="same")
    found = await store.matches("t", "", chain_of(history(5, "same")), 3)
    assert found == (HistoryMatch("b", 8, whole=True),)


async def test_of_equal_histories_the_latest_counts(store: SessionStore) -> None:
    """Two sessions with one history: the one that was updated last is continued."""
    for name in ("a", "b"):
        messages = history(2, "same")
        await store.update("t", name, turn_change(name, messages), chain_of(messages))
        await asyncio.sleep(0.01)
    found = await store.matches("t", "", chain_of(history(3, "same")), 3)
    assert [match.session for match in found if match.whole] == ["b"]


async def test_keys_keep_conversations_apart(store: SessionStore) -> None:
    """The same history under another key is another session."""
    await put(store, "a", 2, key="user:x")
    chain = chain_of(history(2, "a"))
    assert await store.matches("t", "user:y", chain, 3) == ()
    assert await store.matches("t", "user:x", chain, 3) != ()


async def test_an_update_without_a_history_keeps_the_known_one(store: SessionStore) -> None:
    """A change beside the conversation leaves the session where it is found."""
    await put(store, "a", 2)
    await store.update("t", "a", lambda session: (session or blank("a")).lose_turn())
    found = await store.matches("t", "", chain_of(history(3, "a")), 3)
    assert found == (HistoryMatch("a", 6, whole=True),)
    session = await store.get("t", "a")
    assert session is not None and session.unnamed == 1 and len(session.turns) == 1


async def test_a_failed_change_leaves_the_session(store: SessionStore) -> None:
    """A session is never lost to an update that raises."""
    written = await put(store, "a", 2)

    def fails(_: Session | None) -> Session:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        await store.update("t", "a", fails, [9])
    assert await store.get("t", "a") == written
    assert await store.matches("t", "", chain_of(history(2, "a")), 3) != ()


async def test_no_update_of_many_at_once_is_lost(store: SessionStore) -> None:
    """Each of several requests of one session at the same time finds what the others left."""
    await put(store, "a", 1)

    def change(session: Session | None) -> Session:
        assert session is not None
        return after_turn(session, history(1, "a"))

    await asyncio.gather(*(store.update("t", "a", change) for _ in range(5)))
    session = await store.get("t", "a")
    assert session is not None
    assert session.next_index == 6
    assert [summary.index for summary in session.history] == list(range(6))


async def test_the_list_is_latest_first(store: SessionStore) -> None:
    """A tenant's list has the sessions' sums, the last updated first."""
    for name in ("a", "b", "a"):
        await put(store, name, 2)
        await asyncio.sleep(0.01)
    seen = await store.sessions("t")
    assert [each.id for each in seen] == ["a", "b"]
    assert [each.totals.turns for each in seen] == [2, 1]
    assert seen[0].totals.prompt_tokens == 2 * seen[1].totals.prompt_tokens > 0
    assert all(each.answered for each in seen)
    assert await store.count() == 2


async def test_a_deleted_session_is_gone(store: SessionStore) -> None:
    """It is in no list and found by nothing, and its deletion is reported once."""
    await put(store, "a", 2)
    await put(store, "b", 2)
    assert await store.delete("t", "a")
    assert not await store.delete("t", "a")
    assert await store.get("t", "a") is None
    assert await store.matches("t", "", chain_of(history(2, "a")), 3) == ()
    assert [each.id for each in await store.sessions("t")] == ["b"]
    assert await store.count() == 1


async def test_sessions_expire(opener: Opener) -> None:
    """A session that wasn't updated for its time to live is gone from everywhere."""
    store = await opener(ttl_s=1.5)
    await put(store, "a", 2)
    await put(store, "b", 2)
    await asyncio.sleep(1.0)
    await put(store, "a", 3)
    await asyncio.sleep(1.0)
    assert await store.get("t", "b") is None
    assert await store.matches("t", "", chain_of(history(3, "b")), 3) == ()
    assert await store.get("t", "a") is not None
    assert [each.id for each in await store.sessions("t")] == ["a"]
    assert await store.count() == 1


async def test_the_oldest_go_first(opener: Opener) -> None:
    """Beyond the bound the sessions that were updated longest ago are dropped."""
    store = await opener(max_sessions=2)
    for name in ("a", "b", "a", "c"):
        await put(store, name, 2)
        await asyncio.sleep(0.01)
    assert [each.id for each in await store.sessions("t")] == ["c", "a"]
    assert await store.get("t", "b") is None
    assert await store.count() == 2


async def test_a_tenant_with_many_sessions_pushes_out_its_own(opener: Opener) -> None:
    """Another tenant's only session stays, though it is the oldest of all."""
    store = await opener(max_sessions=4)
    await put(store, "mine", 3, tenant="quiet")
    for number in range(8):
        await put(store, f"s{number}", 1, tenant="busy")
        await asyncio.sleep(0.01)
    assert await store.get("quiet", "mine") is not None
    assert [each.id for each in await store.sessions("busy")] == ["s7", "s6", "s5"]
    assert await store.count() == 4


async def test_a_turn_is_in_flight_until_it_is_settled_or_given_up(opener: Opener) -> None:
    """Other requests of its session see it meanwhile; those of another tenant don't."""
    store = await opener()
    await put(store, "a", 1)
    await put(store, "a", 1, tenant="other")
    for turn in ("t1-1", "t1-2"):
        await store.open_turn("t", "a", turn, "")

    async def in_flight(tenant: str) -> frozenset[str]:
        found = await store.get(tenant, "a")
        assert found is not None
        return found.in_flight

    assert await in_flight("t") == {"t1-1", "t1-2"}
    assert await in_flight("other") == frozenset()
    await store.close_turn("t", "a", "t1-1")
    messages = history(2, "a")
    await store.update("t", "a", turn_change("a", messages), chain_of(messages), ends="t1-2")
    assert await in_flight("t") == frozenset()


async def test_a_settled_turn_is_no_longer_in_flight(store: SessionStore) -> None:
    """Noting a turn and settling it leaves the session as if it had never been noted."""
    await store.open_turn("t", "a", "t0-1", "")
    messages = history(1, "a")
    change = turn_change("a", messages)
    written = await store.update("t", "a", change, chain_of(messages), ends="t0-1")
    found = await store.get("t", "a")
    assert found == written
    assert (written.unnamed, written.in_flight) == (0, frozenset())
    await store.open_turn("t", "a", "t1-1", "")
    await store.close_turn("t", "a", "t1-1")
    assert await store.get("t", "a") == written
