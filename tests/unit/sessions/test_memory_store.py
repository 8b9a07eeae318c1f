"""The in-memory store: bounds, expiry, and finding a conversation by its history."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.character_turns import turn_of
from support.clock import Clock

from leyline_proxy.model.history import HistoryMatch
from leyline_proxy.model.session import Session
from leyline_proxy.sessions import MemorySessionStore, SessionChange


def new_session(session_id: str, tenant: str = "t", key: str = "") -> SessionChange:
    """A change that makes the session, or counts one more turn."""

    def change(session: Session | None) -> Session:
        if session is not None:
            return replace(session, next_index=session.next_index + 1)
        return Session(session_id, tenant, key, (), (), 0, 0.0)

    return change


def store(**options: float) -> MemorySessionStore:
    """A store of ten sessions that never expire, unless said otherwise."""
    given = {"max_sessions": 10, "ttl_s": 1e9, **options}
    return MemorySessionStore(
        max_sessions=int(given["max_sessions"]),
        ttl_s=given["ttl_s"],
        max_bytes=int(given.get("max_bytes", 1 << 30)),
        idle_pack_s=-1.0,
        clock=given.get("clock", Clock()),  # type: ignore[arg-type]
    )


async def test_the_oldest_go_first() -> None:
    """Beyond the bound the least recently updated session is dropped, with its index."""
    kept = store(max_sessions=2)
    await kept.update("t", "a", new_session("a"), [1])
    await kept.update("t", "b", new_session("b"), [2])
    await kept.update("t", "a", new_session("a"), [1])
    await kept.update("t", "c", new_session("c"), [3])
    assert [session.id for session in await kept.sessions("t")] == ["c", "a"]
    assert await kept.get("t", "b") is None
    assert await kept.matches("t", "", [2], 2) == ()
    assert await kept.count() == 2


async def test_a_tenant_with_heavy_sessions_pushes_out_its_own() -> None:
    """Of the bytes, too, the tenant that has the most loses some, packed sessions included."""
    heavy = [*range(4000)]
    kept = store(max_sessions=10, max_bytes=120 * 12_000)
    await kept.update("quiet", "mine", new_session("mine", "quiet"), [1])
    for name in "abcd":
        await kept.update("busy", name, new_session(name, "busy"), [*heavy, ord(name)])
        await kept.pack_idle()
    assert [session.id for session in await kept.sessions("busy")] == ["d", "c"]
    assert await kept.get("quiet", "mine") is not None
    for name in ("d", "c"):
        assert await kept.delete("busy", name)
    assert await kept.delete("quiet", "mine")
    assert kept.held_bytes == 0


async def test_heavy_sessions_push_out_old_ones() -> None:
    """Beyond the byte budget the least recently updated go, never the one in use."""
    turn = replace(turn_of([{"role": "user", "content": "x"}]), weight=60)

    def heavy(name: str) -> SessionChange:
        return lambda _: Session(name, "t", "", (turn,), (), 0, 0.0)

    kept = MemorySessionStore(max_sessions=10, ttl_s=1e9, max_bytes=100)
    for name in ("a", "b", "b", "c"):
        await kept.update("t", name, heavy(name), [1])
        assert await kept.get("t", name) is not None
        assert await kept.count() == 1


async def test_sessions_expire() -> None:
    """A session that wasn't used for its time to live is gone, and an update renews it."""
    clock = Clock()
    kept = MemorySessionStore(max_sessions=10, ttl_s=10, clock=clock)
    await kept.update("t", "a", new_session("a"), [1])
    await kept.update("t", "b", new_session("b"), [2])
    clock.now = 8
    await kept.update("t", "a", new_session("a"), [1])
    clock.now = 15
    assert await kept.get("t", "b") is None
    assert await kept.get("t", "a") is not None
    clock.now = 30
    assert await kept.count() == 0


async def test_tenants_never_meet() -> None:
    """Neither ids nor histories cross from one tenant to another."""
    kept = store()
    await kept.update("red", "a", new_session("a", "red"), [1, 2])
    assert await kept.get("blue", "a") is None
    assert await kept.matches("blue", "", [1, 2], 2) == ()
    assert await kept.sessions("blue") == ()


async def test_an_extended_history_is_found() -> None:
    """The session whose whole history is a prefix counts, also one of a single message."""
    kept = store()
    await kept.update("t", "a", new_session("a"), [1])
    found = await kept.matches("t", "", [1, 2, 3], 2)
    assert found == (HistoryMatch("a", 1, whole=True),)


async def test_an_edited_history_needs_enough_in_common() -> None:
    """A history that differs after the first two messages is found, before them it isn't."""
    kept = store()
    await kept.update("t", "a", new_session("a"), [1, 2, 3, 4])
    found = await kept.matches("t", "", [1, 2, 30, 40], 2)
    assert found == (HistoryMatch("a", 2, whole=False),)
    assert await kept.matches("t", "", [1, 20, 30], 2) == ()


async def test_the_longest_common_history_wins() -> None:
    """Of several branches the one that is continued ends the search."""
    kept = store()
    await kept.update("t", "a", new_session("a"), [1, 2, 3])
    await kept.update("t", "b", new_session("b"), [1, 2, 4])
    found = await kept.matches("t", "", [1, 2, 3, 5], 2)
    assert found[0] == HistoryMatch("a", 3, whole=True)


async def test_keys_keep_conversations_apart() -> None:
    """The same history under another key is another session."""
    kept = store()
    await kept.update("t", "a", new_session("a", key="user:x"), [1, 2])
    assert await kept.matches("t", "user:y", [1, 2], 2) == ()
    assert await kept.matches("t", "user:x", [1, 2], 2) != ()


async def test_a_failed_change_leaves_the_session() -> None:
    """A session is never lost to an update that raises."""
    kept = store()
    await kept.update("t", "a", new_session("a"), [1, 2])

    def fails(_: Session | None) -> Session:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        await kept.update("t", "a", fails, [9])
    assert await kept.get("t", "a") is not None
    assert await kept.matches("t", "", [1, 2], 2) != ()


@given(
    st.lists(
        st.tuples(st.sampled_from("abcde"), st.lists(st.integers(0, 3), max_size=4)), max_size=30
    )
)
async def test_the_index_never_outlives_its_sessions(updates: list[tuple[str, list[int]]]) -> None:
    """After any updates, what is found is in the store, and its history shares the prefix."""
    kept = store(max_sessions=3)
    chains: dict[str, list[int]] = {}
    for name, chain in updates:
        unique = [
            sum(10**place * (value + 1) for place, value in enumerate(chain[: end + 1]))
            for end in range(len(chain))
        ]
        await kept.update("t", name, new_session(name), unique)
        chains[name] = unique
    for chain in chains.values():
        for match in await kept.matches("t", "", chain, 1):
            assert await kept.get("t", match.session) is not None
            assert chains[match.session][: match.length] == chain[: match.length]
            assert match.whole == (len(chains[match.session]) == match.length)
