"""Redis that is killed, hangs, is restarted or loses writes: no turn waits, no loss is
forgotten."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from support.redis_server import RedisServer, redis_server
from support.sessions import (
    after_turn,
    blank,
    chain_of,
    history,
    pipeline,
    render,
    turn_change,
)

from leyline_proxy.edits.prepare import prepare
from leyline_proxy.model.session import Departed, Place, Session
from leyline_proxy.model.spans import ANYTHING
from leyline_proxy.plan.forgetting import spans_to_forget
from leyline_proxy.plan.naming import name_spans
from leyline_proxy.sessions.redis import RedisLink, RedisOptions, RedisSessionStore, Seal
from leyline_proxy.sessions.redis import store as store_module
from leyline_proxy.sessions.redis.store import Losses
from leyline_proxy.sessions.redis.stored import STALE_S

SECRET = "a secret of sixteen characters or more"
PATIENCE_S = 10.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis of the test's own, which survives a kill by its append-only file."""
    with redis_server(tmp_path, "--appendonly", "yes", "--appendfsync", "always") as running:
        yield running


class Clock:
    """The time, and what a test adds to it."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead


@asynccontextmanager
async def proxy(
    server: RedisServer,
    *,
    secret: str | None = SECRET,
    killed: bool = False,
    clock: Clock | None = None,
    timeout_s: float = 0.3,
) -> AsyncIterator[RedisSessionStore]:
    """A proxy's store, looked after; ``killed``: it ends without taking leave."""
    link = RedisLink(RedisOptions(server.url, connect_timeout_s=timeout_s, timeout_s=timeout_s))
    store = RedisSessionStore(link, ttl_s=60, seal=Seal([SECRET]), clock=clock or Clock())
    await store.connect()
    task = asyncio.create_task(store.run())
    try:
        yield store
    finally:
        task.cancel()
        await asyncio.wait((task,))
        await (link.aclose() if killed else store.aclose())


async def until_back(store: RedisSessionStore) -> None:
    """Wait until the store says that all is well."""
    deadline = time.monotonic() + PATIENCE_S
    while store.problem is not None:
        assert time.monotonic() < deadline, store.problem
        await asyncio.sleep(0.02)


async def put(store: RedisSessionStore, name: str, turns: int, ends: str | None = None) -> Session:
    """One more turn of a conversation."""
    messages = history(turns, name)
    change = turn_change(name, messages)
    return await store.update("t", name, change, chain_of(messages), ends=ends)


def forgotten(session: Session | None) -> tuple[str, ...]:
    """Return the forget demands of a session's turn that takes a secret out of it."""
    messages = history(0)
    prepared = prepare(messages, pipeline(r"redact:pattern='sk-\w+'"), (), 9)
    assert prepared.forget_marks
    names = name_spans("t9", prepared, [], Departed(), render(prepared.messages))
    return spans_to_forget("t9", prepared, names, session, named=session is not None)


async def test_a_killed_redis_keeps_nobody_waiting(server: RedisServer) -> None:
    """Requests don't fail and don't wait, and the store says that it is out of reach."""
    async with proxy(server) as store:
        await put(store, "a", 2)
        server.kill()
        await store.get("t", "a")
        assert store.problem is not None and "127.0.0.1" not in store.problem
        started = time.monotonic()
        for _ in range(50):
            assert await store.matches("t", "", chain_of(history(3, "a")), 3) == ()
            session = await store.get("t", "a")
            assert session is not None and not session.answered and not session.turns
            await put(store, "a", 3)
            await store.open_turn("t", "a", "t1")
            await store.close_turn("t", "a", "t1")
            assert await store.sessions("t") == ()
            assert await store.count() == 0
        assert time.monotonic() - started < 1.0


async def test_a_hanging_redis_costs_one_time_limit(server: RedisServer) -> None:
    """The first to ask waits for the time limit, and none after."""
    async with proxy(server) as store:
        await put(store, "a", 2)
        server.pause()
        try:
            started = time.monotonic()
            await asyncio.gather(*(store.get("t", "a") for _ in range(20)))
            await asyncio.gather(*(put(store, "a", 3) for _ in range(20)))
            assert time.monotonic() - started < 1.5
            assert store.problem is not None
        finally:
            server.resume()
        await until_back(store)
        session = await store.get("t", "a")
        assert session is not None and len(session.turns) == 1


async def test_a_session_goes_on_after_an_outage_with_a_loss(server: RedisServer) -> None:
    """Stored data is there again; after turns during the outage a forget covers everything."""
    async with proxy(server) as store:
        await put(store, "a", 2)
        await put(store, "quiet", 2)
        before = await store.get("t", "a")
        assert before is not None and before.unnamed == 0
        server.pause()
        await put(store, "a", 3)
        await put(store, "a", 4)
        await put(store, "new", 1)
        server.resume()
        await until_back(store)
        session = await store.get("t", "a")
        assert session is not None
        assert session.turns == before.turns
        assert session.unnamed >= 2
        assert ANYTHING in forgotten(session)
        quiet = await store.get("t", "quiet")
        assert quiet is not None and quiet.unnamed == 0
        assert ANYTHING not in forgotten(quiet)
        found = await store.matches("t", "", chain_of(history(5, "a")), 3)
        assert [match.session for match in found] == ["a"]
        new = await store.get("t", "new")
        assert new is not None and not new.answered and ANYTHING in forgotten(new)
        written = await put(store, "new", 2)
        assert written.answered and written.unnamed >= 1


async def test_a_forget_of_everything_settles_a_loss(server: RedisServer) -> None:
    """Losses that a forget made good are not made good again."""
    async with proxy(server) as store:
        await put(store, "a", 2)
        server.pause()
        await put(store, "a", 3)
        server.resume()
        await until_back(store)
        planned = await store.get("t", "a")
        assert planned is not None and planned.unnamed

        def change(session: Session | None) -> Session:
            assert session is not None
            return after_turn(session.account_for(planned.unnamed), history(4, "a"))

        assert (await store.update("t", "a", change)).unnamed == 0
        again = await store.get("t", "a")
        assert again is not None and again.unnamed == 0


async def test_a_forget_during_an_outage_is_one_of_everything(server: RedisServer) -> None:
    """An engine's content of a session that can't be read is unknown, be it new or not."""
    async with proxy(server) as store:
        assert ANYTHING not in forgotten(await store.get("t", "a"))
        server.kill()
        assert ANYTHING in forgotten(await store.get("t", "a"))


@pytest.mark.parametrize(
    ("setting", "refusal"), [("min-replicas-to-write", "NOREPLICAS"), ("maxmemory", "OutOfMemory")]
)
async def test_a_redis_that_takes_no_writes_is_gone(
    server: RedisServer, setting: str, refusal: str
) -> None:
    """It still answers reads, but its sessions lack the turns that it refuses, and a forget must
    reach these, too."""
    async with proxy(server) as store:
        await put(store, "a", 2)
        with server.client() as client:
            client.config_set(setting, 1)
        await put(store, "a", 3)
        assert store.problem is not None and refusal in store.problem
        assert ANYTHING in forgotten(await store.get("t", "a"))
        await store.connect()
        assert store.problem is not None and ANYTHING in forgotten(await store.get("t", "a"))
        with server.client() as client:
            client.config_set(setting, 0)
        await until_back(store)
        assert ANYTHING in forgotten(await store.get("t", "a"))


async def test_a_refused_write_is_a_loss_at_once(server: RedisServer) -> None:
    """A forget that is demanded before the next heartbeat covers the turn that isn't written."""
    async with proxy(server) as store:
        await put(store, "a", 2)
        with server.client() as client:
            client.execute_command("ACL SETUSER default -hset")
        await put(store, "a", 3)
        assert store.problem is None
        assert ANYTHING in forgotten(await store.get("t", "a"))


async def test_too_many_losses_are_one_of_all_sessions(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If they can't be remembered one by one, every session that was stored has a loss."""
    monkeypatch.setattr(store_module, "Losses", lambda: Losses(limit=3))
    async with proxy(server) as store:
        await put(store, "quiet", 2)
        server.pause()
        for name in "abcdef":
            await put(store, name, 1)
        server.resume()
        await until_back(store)
        quiet = await store.get("t", "quiet")
        assert quiet is not None and quiet.unnamed == 1
        written = await put(store, "quiet", 3)
        assert written.unnamed == 1, "the loss is counted once"
        assert await store.get("t", "quiet") == written


async def test_a_restarted_redis_may_have_lost_writes(server: RedisServer) -> None:
    """After a restart every session has a loss, though none was noticed and nothing ran."""
    async with proxy(server) as store:
        await put(store, "a", 2)
        server.kill()
        server.start()
        await asyncio.sleep(0)
        await store.get("t", "a")  # finds the connection broken, and makes no new one by itself
        await until_back(store)
        session = await store.get("t", "a")
        assert session is not None and len(session.turns) == 1
        assert session.unnamed == 1


async def test_a_restart_between_two_proxies_is_noticed(server: RedisServer) -> None:
    """A proxy that starts after the restart has a loss, too: the servers' runs are in Redis."""
    async with proxy(server) as store:
        await put(store, "a", 2)
    server.kill()
    server.start()
    async with proxy(server) as store:
        session = await store.get("t", "a")
        assert session is not None and session.unnamed == 1
    async with proxy(server) as store:
        session = await store.get("t", "a")
        assert session is not None and session.unnamed == 1, "once for each restart"


async def test_an_empty_redis_after_a_restart_is_a_new_start(tmp_path: Path) -> None:
    """A Redis that keeps nothing loses sessions, and they begin again."""
    with redis_server(tmp_path) as server:
        async with proxy(server) as store:
            await put(store, "a", 2)
            server.kill()
            server.start()
            await store.get("t", "a")
            await until_back(store)
            assert await store.get("t", "a") is None
            assert await put(store, "a", 3) == await store.get("t", "a")


async def test_a_turn_of_a_killed_proxy_is_a_loss(server: RedisServer) -> None:
    """A turn that was given to an engine by a proxy that was killed makes the next forget one of
    everything, in a session that is known and in one whose first turn it was."""
    async with proxy(server, killed=True) as store:
        await put(store, "a", 2)
        await store.open_turn("t", "a", "t1-x", "")
        await store.open_turn("t", "new", "t0-x", "k")
    clock = Clock()
    async with proxy(server, clock=clock) as store:
        for name in ("a", "new"):
            assert ANYTHING in forgotten(await store.get("t", name))
        assert ANYTHING not in forgotten(await store.get("t", "b"))
        # Meanwhile others are settled; the note stays.
        await put(store, "a", 3, ends="t1-y")
        session = await store.get("t", "a")
        assert session is not None and session.in_flight == {"t1-x"} and session.unnamed == 0
        clock.ahead = STALE_S + 1
        session = await store.get("t", "a")
        assert session is not None and not session.in_flight and session.unnamed == 1
        await put(store, "a", 4)
        await put(store, "a", 5)
        session = await store.get("t", "a")
        assert session is not None and session.unnamed == 1, "an old note becomes one loss"
        new = await store.get("t", "new")
        assert new is not None and new.key == "k"


async def test_a_proxy_killed_during_an_outage_is_noticed(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is gone with it: every session has a loss once it has been silent."""
    monkeypatch.setattr(store_module, "_SILENT_S", 0.5)
    monkeypatch.setattr(store_module, "_BEAT_S", 0.1)
    async with proxy(server, killed=True) as store:
        await put(store, "a", 2)
    async with proxy(server) as store:
        await asyncio.sleep(1)
        session = await store.get("t", "a")
        assert session is not None and session.unnamed == 1
    async with proxy(server) as store:
        await asyncio.sleep(1)
        session = await store.get("t", "a")
        assert session is not None and session.unnamed == 1, "the other took its leave"


async def test_where_lost_turns_ran_is_known_later(server: RedisServer) -> None:
    """A forget must reach engines that were given a killed proxy's turn, or one in an outage."""
    async with proxy(server, killed=True) as store:
        await put(store, "a", 2)
        await store.open_turn("t", "a", "t1-x", run="run-x", replica="x")
    clock = Clock()
    async with proxy(server, clock=clock) as store:
        session = await store.get("t", "a")
        assert session is not None and session.places["run-x"] == Place("x")
        server.pause()
        await store.get("t", "a")

        def elsewhere(_: Session | None) -> Session:
            return replace(blank("a"), places={"run-y": Place("y")})

        await store.update("t", "a", elsewhere)
        server.resume()
        await until_back(store)
        clock.ahead = STALE_S + 1
        session = await store.get("t", "a")
        assert session is not None and session.unnamed == 2
        written = await store.update("t", "a", lambda known: known or blank("a"))
        assert {"run0", "run-x", "run-y"} <= written.places.keys()
        assert await store.get("t", "a") == written, "noted in the session, the notes are gone"
        with server.client() as client:
            assert client.keys("leyline:*:i") == []


async def test_notes_of_turns_are_bounded(server: RedisServer) -> None:
    """A session's turns in flight are counted once there are too many to name."""
    async with proxy(server) as store:
        await put(store, "a", 2)
        for number in range(80):
            await store.open_turn("t", "a", f"t1-{number}")
        with server.client() as client:
            (entry,) = client.keys("leyline:*:i")
            assert client.hlen(entry) == 64
        session = await store.get("t", "a")
        assert session is not None and len(session.in_flight) == 64 and session.unnamed == 16


async def test_racing_proxies_account_for_every_turn(server: RedisServer) -> None:
    """Of turns that two proxies settle at the same time each is in the history, or is a loss."""
    count = 40
    # Nothing is out of reach here, however busy the machine is.
    async with proxy(server, timeout_s=20) as store, proxy(server, timeout_s=20) as rival:
        await put(store, "a", 1)

        async def settle(number: int) -> None:
            proxied = (store, rival)[number % 2]
            await proxied.open_turn("t", "a", f"x{number}")

            def change(session: Session | None) -> Session:
                assert session is not None
                return after_turn(session, history(1, "a"))

            await proxied.update("t", "a", change, ends=f"x{number}")

        await asyncio.gather(*map(settle, range(count)))
        session = await store.get("t", "a")
        assert session is not None
        assert session.next_index - 1 + session.unnamed == count
        assert session.next_index > 4
        assert [each.index for each in session.history] == list(range(session.next_index))
        assert not session.in_flight
        assert await rival.get("t", "a") == session


async def test_an_update_that_always_loses_the_race_is_a_loss(server: RedisServer) -> None:
    """A change that others forestall again and again isn't tried for ever, nor forgotten."""
    async with proxy(server, timeout_s=20) as store, proxy(server, timeout_s=20) as rival:
        await put(store, "a", 2)
        tried = 0

        original = store._replace

        async def forestalled(*given: object) -> bool:
            nonlocal tried
            tried += 1
            await rival.update("t", "a", lambda session: session or blank("a"))
            return await original(*given)  # type: ignore[arg-type]

        store._replace = forestalled  # type: ignore[method-assign, assignment]
        await put(store, "a", 3)
        assert 1 < tried < 20
        session = await rival.get("t", "a")
        assert session is not None and session.next_index == 1 and session.unnamed == 1
