"""Prompt text in Redis: encrypted or not there, purged by a forget, closed to other tenants."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.redis_server import RedisServer, redis_server
from support.sessions import after_turn, chain_of, history, turn_change

from leyline_proxy.model.messages import Message, fingerprint
from leyline_proxy.model.session import Session
from leyline_proxy.sessions.codec import decode_session
from leyline_proxy.sessions.redis import RedisLink, RedisOptions, RedisSessionStore, Seal
from leyline_proxy.sessions.redis.keys import Keys
from leyline_proxy.sessions.redis.sealing import owner_of

OLD, NEW = "the old secret, long enough", "the new secret, long enough"
TEXT = "sk-secret7"
TASK = "Look into ZEBRA-7351."


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One Redis for the module."""
    with redis_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture(autouse=True)
def _empty(request: pytest.FixtureRequest) -> None:
    if "server" in request.fixturenames:
        with request.getfixturevalue("server").client() as client:
            client.flushall()


@asynccontextmanager
async def proxy(
    server: RedisServer, *secrets: str, most: int = 4 << 20
) -> AsyncIterator[RedisSessionStore]:
    """A proxy's store with these secrets."""
    store = RedisSessionStore(
        RedisLink(RedisOptions(server.url)), ttl_s=60, seal=Seal(secrets), max_session_bytes=most
    )
    await store.connect()
    try:
        yield store
    finally:
        await store.aclose()


async def put(
    store: RedisSessionStore, messages: Sequence[Message], name: str = "a", **options: str
) -> Session:
    """One more turn."""
    tenant = options.get("tenant", "t")
    change = turn_change(name, messages, **options)
    return await store.update(tenant, name, change, chain_of(messages))


def everything(server: RedisServer) -> bytes:
    """All names and values that lie in Redis."""
    parts: list[bytes] = []
    with server.client() as client:
        for key in client.keys("*"):
            kind = client.type(key)
            parts.append(key)
            if kind == b"hash":
                parts += [part for pair in client.hgetall(key).items() for part in pair]
            elif kind == b"zset":
                parts += client.zrange(key, 0, -1)
            else:
                parts.append(client.get(key))
    return b"\0".join(parts)


def data_of(server: RedisServer, tenant: str = "t", name: str = "a") -> bytes:
    """The stored data of a session."""
    with server.client() as client:
        found = client.hget(Keys("leyline").session(tenant, name), "d")
    assert found is not None
    return found


@pytest.mark.parametrize("secrets", [(), (NEW,)], ids=["without-key", "with-key"])
async def test_no_text_lies_in_the_open(server: RedisServer, secrets: tuple[str, ...]) -> None:
    """Nothing in Redis holds text, token ids, or bare hashes of messages, with a key or without."""
    messages = history(3, TASK)
    async with proxy(server, *secrets) as store:
        session = await put(store, messages, spec=f"redact:pattern={TEXT}")
        await store.open_turn("t", "a", "t1-x", "user:someone")
    lying = everything(server)
    stored = data_of(server)
    plain = decode_session(stored[1:])
    assert (plain is None) == bool(secrets)
    if plain is not None:
        lying += repr(plain).encode()
        assert not plain.turns and not plain.departed.size and not plain.policy_states
    assert TEXT.encode() not in lying and b"ZEBRA" not in lying
    for message in messages:
        value = fingerprint(message)
        assert value.to_bytes(8, "little") not in lying and str(value).encode() not in lying
    ids = session.turns[-1].rendered.tokens[:8]
    assert memoryview(ids).cast("B").tobytes() not in lying


async def test_without_a_key_only_the_account_outlives_a_proxy(server: RedisServer) -> None:
    """The proxy itself keeps splicing; another has turns' receipts, and a loss of account."""
    async with proxy(server) as store, proxy(server) as other:
        await put(store, history(2, TASK))
        own = await put(store, history(3, TASK))
        assert await store.get("t", "a") == own
        assert len(own.turns) == 2 and own.unnamed == 0
        found = await other.get("t", "a")
        assert found is not None
        assert (found.history, found.turns) == (own.history, ())
        assert found is not None and found.unnamed > 0
        assert (await other.sessions("t"))[0].totals.turns == 2
        match = await other.matches("t", "", chain_of(history(4, TASK)), 3)
        assert [(each.session, each.whole) for each in match] == [("a", True)]


async def test_another_proxy_with_the_key_has_it_all(server: RedisServer) -> None:
    """With a key, what one proxy wrote the other reads in full."""
    async with proxy(server, NEW) as store, proxy(server, NEW) as other:
        written = await put(store, history(2, TASK))
        assert await other.get("t", "a") == written
        written = await put(other, history(3, TASK))
        assert await store.get("t", "a") == written


async def test_keys_are_rotated(server: RedisServer) -> None:
    """The first key encrypts, all decrypt, and the next write moves a session to the first."""
    async with proxy(server, OLD) as store:
        first = await put(store, history(2, TASK))
    async with proxy(server, NEW, OLD) as store:
        assert await store.get("t", "a") == first
        second = await put(store, history(3, TASK))
    async with proxy(server, NEW) as store:
        assert await store.get("t", "a") == second
    async with proxy(server, OLD) as store:
        lost = await store.get("t", "a")
        assert lost is not None and not lost.turns and lost.unnamed > 0
        assert (await put(store, history(4, TASK))).unnamed > 0


@pytest.mark.parametrize("damage", ["cut", "flipped", "made-up", "gone", "other-tenant"])
async def test_damaged_values_are_losses(server: RedisServer, damage: str) -> None:
    """A value that doesn't open is no session: its conversation continues with a loss of
    account."""
    async with proxy(server, NEW) as store:
        await put(store, history(2, TASK))
        await put(store, history(2, TASK), tenant="other")
    good = data_of(server)
    bad = {
        "cut": good[:-5],
        "flipped": good[:-1] + bytes([good[-1] ^ 1]),
        "made-up": b"P" + Seal().close(b"", b""),
        "gone": b"",
        "other-tenant": data_of(server, "other"),
    }[damage]
    with server.client() as client:
        client.hset(Keys("leyline").session("t", "a"), "d", bad)
    async with proxy(server, NEW) as store:
        session = await store.get("t", "a")
        assert session is not None and not session.answered
        assert session.unnamed > 0
        written = await put(store, history(3, TASK))
        assert await store.get("t", "a") == written
        assert len(written.turns) == 1


async def test_what_a_forget_removed_is_purged(server: RedisServer) -> None:
    """After the turn that forgets, the stored session holds neither text nor tokens nor hash."""
    async with proxy(server, NEW) as store:
        await put(store, history(2, TASK))
        before = _opened(server)
        assert TEXT in repr(before.turns)

        def change(session: Session | None) -> Session:
            assert session is not None
            forgotten = session.forget_sources().account_for(0)
            redacted = [{**each} for each in history(3, TASK)]
            redacted[0]["content"] = "You are careful. [gone]"
            return after_turn(forgotten, redacted)

        await store.update("t", "a", change)
    after = _opened(server)
    assert after.turns and TEXT not in repr(after)
    gone = "".join(map(chr, after.turns[-1].rendered.tokens))
    assert TEXT not in gone


def _opened(server: RedisServer) -> Session:
    raw = Seal([NEW]).open(data_of(server), owner_of("t", "a"))
    session = decode_session(raw or b"")
    assert session is not None
    return session


async def test_a_session_that_is_too_long_keeps_its_account(server: RedisServer) -> None:
    """Beyond the limit the history is stored, and sources only where they are."""
    async with proxy(server, NEW, most=3000) as store, proxy(server, NEW) as other:
        small = await put(store, history(1, TASK, size=1), name="small")
        assert await other.get("t", "small") == small
        messages = [*history(2, TASK)]
        messages[3] = {**messages[3], "content": "".join(map(chr, range(300, 6000)))}
        large = await put(store, messages)
        assert await store.get("t", "a") == large and large.turns
        found = await other.get("t", "a")
        assert found is not None
        assert (found.history, found.turns, found.unnamed) == (large.history, (), 1)
        assert len(data_of(server)) < 3000


@given(st.binary(max_size=300), st.text(max_size=8), st.text(max_size=8), st.binary(max_size=300))
def test_only_the_owner_opens(data: bytes, tenant: str, session: str, noise: bytes) -> None:
    """A closed value opens for its owner alone; noise never opens."""
    seal, owner = Seal([NEW, OLD]), owner_of(tenant, session)
    closed = seal.close(data, owner)
    assert seal.open(closed, owner) == data
    assert seal.close(data, owner) != closed
    assert seal.open(closed, owner_of(tenant + session, "")) is None or not session
    assert Seal([OLD]).open(closed, owner) is None
    assert Seal().open(closed, owner) is None
    assert seal.open(noise, owner) is None
    assert seal.open(closed[:5] + noise, owner) is None or noise == closed[5:]


def test_names_of_entries_tell_nothing(tmp_path: Path) -> None:
    """Neither tenant nor session id is in a name, and no two owners share one."""
    keys = Keys("p")
    names = {keys.session("red", "blue"), keys.session("redb", "lue"), keys.session("", "redblue")}
    assert len(names) == 3
    assert not any(word in name for name in names for word in ("red", "blue", "lue"))


@pytest.mark.parametrize("secrets", [(), (NEW,)], ids=["without-key", "with-key"])
async def test_a_callers_name_is_kept_like_text(
    server: RedisServer, secrets: tuple[str, ...]
) -> None:
    """A name that is no id may hold any text: it is encrypted or not there, only its own session's
    line shows it, and the session that is read has it, too."""
    name, messages = f"Fix {TEXT}", history(2)
    async with proxy(server, *secrets) as store, proxy(server, *secrets) as other:
        for which in ("a", "b"):
            change = turn_change(which, messages)
            called = name if which == "a" else ""
            await store.update(
                "t", which, lambda known, c=change, n=called: replace(c(known), name=n), ()
            )
        assert TEXT.encode() not in everything(server)
        lines = {line.id: line.name for line in await other.sessions("t")}
        found = await other.get("t", "a")
        assert lines == {"a": name if secrets else "", "b": ""}
        assert found is not None and found.name == (name if secrets else "")
        with server.client() as client:  # another session's value opens nothing
            keys = [Keys("leyline").session("t", each) for each in ("a", "b")]
            client.hset(keys[1], "n", client.hget(keys[0], "n") or b"x")
        assert {line.id: line.name for line in await other.sessions("t")} == lines
