"""Responses of connections, beside those that are stored."""

from __future__ import annotations

from leyline_proxy.model.stored_response import StoredResponse
from leyline_proxy.sessions.stored_responses import (
    AllResponses,
    ConnectionResponses,
    MemoryResponseStore,
    ResponseShelf,
)


def store() -> MemoryResponseStore:
    """An empty store."""
    return MemoryResponseStore(ResponseShelf(max_responses=9000, max_bytes=10**7, ttl_s=60))


def response(name: str) -> StoredResponse:
    """A response of a session."""
    return StoredResponse(id=name, session="s", response={"leyline": {"turn_index": 1}})


async def test_what_a_connection_keeps_is_its_own() -> None:
    """Neither another connection finds it, nor another tenant, nor who asks the store; with the
    connection it is gone."""
    stored, memory = store(), store()
    mine, other = (ConnectionResponses(stored, memory) for _ in range(2))
    await mine.keep("red", "resp_1", response("resp_1"))
    await mine.put("red", "resp_2", response("resp_2"))
    assert await mine.get("red", "resp_1") == response("resp_1")
    assert await other.get("red", "resp_2") == response("resp_2")
    for each, tenant in ((other, "red"), (mine, "blue"), (stored, "red"), (memory, "red")):
        assert await each.get(tenant, "resp_1") is None
    await mine.aclose()
    assert await memory.count_in("red", "s") == 0
    assert await stored.count_in("red", "s") == 1


async def test_a_connection_keeps_so_many() -> None:
    """The oldest leaves, also the memory."""
    memory = store()
    mine = ConnectionResponses(store(), memory)
    for number in range(2001):
        await mine.keep("red", f"resp_{number}", response(f"resp_{number}"))
    assert await memory.count_in("red", "s") == 2000
    assert await mine.get("red", "resp_0") is None
    assert await mine.get("red", "resp_1") is not None


async def test_a_session_is_deleted_in_both_stores() -> None:
    """And counted in both, where stored responses aren't in this process's memory."""
    stored, memory = store(), store()
    mine, both = ConnectionResponses(stored, memory), AllResponses(stored, memory)
    await mine.keep("red", "resp_1", response("resp_1"))
    await mine.put("red", "resp_2", response("resp_2"))
    assert await both.count_in("red", "s") == 2
    assert await both.delete_from("red", "s", 0) == 2
    assert await mine.get("red", "resp_1") is None
    assert await mine.get("red", "resp_2") is None
