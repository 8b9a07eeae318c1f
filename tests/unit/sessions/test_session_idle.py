"""Sessions in memory without requests: packed, small, and the same again when opened."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from support.clock import Clock
from support.sessions import after_turn, blank, chain_of, history, turn_change

from leyline_proxy.model.history import HistoryMatch
from leyline_proxy.model.session import Session
from leyline_proxy.sessions import MemorySessionStore
from leyline_proxy.sessions import memory as memory_module
from leyline_proxy.sessions.summary import overview


def kept(clock: Clock, **options: int) -> MemorySessionStore:
    """A store that packs what is idle for ten seconds."""
    given = {"max_sessions": 100, "max_bytes": 1 << 30, **options}
    return MemorySessionStore(ttl_s=1e9, idle_pack_s=10, clock=clock, **given)


async def put(store: MemorySessionStore, name: str, turns: int = 5) -> Session:
    """One more turn of a conversation."""
    messages = history(turns, name)
    return await store.update("t", name, turn_change(name, messages), chain_of(messages))


async def test_an_idle_session_is_packed_and_comes_back() -> None:
    """It takes a fraction of its bytes, is found by its history, and is equal when it is opened."""
    clock = Clock()
    store = kept(clock)
    written = await put(store, "a")
    in_use = store.held_bytes
    clock.now = 11
    await store.pack_idle()
    assert store.held_bytes < in_use / 3
    chain = chain_of(history(6, "a"))
    assert await store.matches("t", "", chain, 3) == (HistoryMatch("a", 12, whole=True),)
    assert await store.sessions("t") == (overview(written),)
    assert store.held_bytes < in_use / 3, "neither search nor list unpacks it"
    found = await store.get("t", "a")
    assert found == written and found is not written
    assert store.held_bytes == in_use
    assert await store.get("t", "a") is found


async def test_a_session_in_use_stays_as_it_is() -> None:
    """Being looked at counts as use; the time to live doesn't."""
    clock = Clock()
    store = kept(clock)
    written = await put(store, "a")
    await put(store, "b")
    clock.now = 6
    await store.get("t", "a")
    clock.now = 11
    in_use = store.held_bytes
    await store.pack_idle()
    assert await store.get("t", "a") is written
    assert store.held_bytes < in_use


async def test_a_packed_session_goes_on() -> None:
    """An update finds what the last one left, and its failure leaves the session packed or not."""
    clock = Clock()
    store = kept(clock)
    first = await put(store, "a")
    clock.now = 11
    await store.pack_idle()

    def fails(_: Session | None) -> Session:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        await store.update("t", "a", fails)
    second = await put(store, "a", 6)
    assert second.history[:-1] == first.history
    assert second == after_turn(first, history(6, "a"))


async def test_what_changes_while_it_is_packed_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A turn that ends while an older state is being packed stays."""
    clock = Clock()
    store = kept(clock)
    await put(store, "a")
    clock.now = 11
    original = asyncio.to_thread

    async def slow(*given: object) -> object:
        done = await original(*given)  # type: ignore[arg-type]
        await put(store, "a", 6)
        return done

    monkeypatch.setattr(memory_module.asyncio, "to_thread", slow)
    await store.pack_idle()
    session = await store.get("t", "a")
    assert session is not None and session.next_index == 2


async def test_a_session_that_cannot_be_packed_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Content that no request could bring costs its bytes, and nothing else."""
    clock = Clock()
    store = kept(clock)
    strange = replace(blank("a"), policy_states={"0": {"x": object()}})
    await store.update("t", "a", lambda _: strange)
    await put(store, "b")
    clock.now = 11
    await store.pack_idle()
    assert await store.get("t", "a") is strange
    assert await store.count() == 2


async def test_bytes_are_those_that_are_held() -> None:
    """Packed sessions weigh what they take, so that more of them fit; dropped ones nothing."""
    clock = Clock()
    probe = kept(clock)
    await put(probe, "a")
    one = probe.held_bytes
    store = kept(clock, max_bytes=4 * one)
    for number in range(8):
        await put(store, f"session-{number}")
        clock.now += 11
        await store.pack_idle()
    assert await store.count() == 8
    hot = kept(clock, max_bytes=4 * one)
    for number in range(8):
        await put(hot, f"session-{number}")
    assert await hot.count() < 5
    small = kept(clock, max_sessions=1)
    await put(small, "a")
    await put(small, "b")
    assert small.held_bytes == pytest.approx(one, rel=0.2)


async def test_the_store_packs_by_itself() -> None:
    """A task beside the requests packs idle sessions."""
    store = MemorySessionStore(max_sessions=9, ttl_s=1e9, idle_pack_s=0.05)
    await put(store, "a")
    in_use = store.held_bytes
    task = asyncio.create_task(store.run())
    for _ in range(100):
        await asyncio.sleep(0.02)
        if store.held_bytes < in_use:
            break
    task.cancel()
    await asyncio.wait((task,))
    assert store.held_bytes < in_use
