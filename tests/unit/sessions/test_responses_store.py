"""The store of responses in memory: its bounds, and that tenants are apart."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from support.clock import Clock

from leyline_proxy.model.stored_response import StoredResponse, encode
from leyline_proxy.sessions.stored_responses import MemoryResponseStore, ResponseShelf


def response(name: str, text: str = "") -> StoredResponse:
    """One of any size."""
    return StoredResponse(id=name, session="s", response={"output": [], "text": text})


def store(**bounds: Any) -> MemoryResponseStore:
    """A store; generous where nothing else is said."""
    generous = {"max_responses": 100, "max_bytes": 1 << 20, "ttl_s": 100.0}
    return MemoryResponseStore(ResponseShelf(**{**generous, **bounds}))


async def test_a_tenant_finds_its_own() -> None:
    """No one else does, under the same id or another; neither can anyone else delete it."""
    kept = store()
    await kept.put("red", "r1", response("r1", "secret"))
    assert await kept.get("red", "r1") == response("r1", "secret")
    assert await kept.get("blue", "r1") is None
    assert not await kept.delete("blue", "r1")
    assert await kept.delete("red", "r1")
    assert await kept.get("red", "r1") is None
    assert not await kept.delete("red", "r1")


async def test_what_wasnt_used_for_long_is_gone() -> None:
    """A use restarts the count."""
    clock = Clock()
    kept = store(ttl_s=10.0, clock=clock)
    await kept.put("t", "a", response("a"))
    await kept.put("t", "b", response("b"))
    clock.now = 8.0
    assert await kept.get("t", "b") is not None
    clock.now = 12.0
    assert await kept.get("t", "a") is None
    assert await kept.get("t", "b") is not None
    clock.now = 40.0
    assert not await kept.delete("t", "b")


async def test_one_tenant_pushes_out_no_other() -> None:
    """The tenant that holds the most loses its own oldest, by number and by bytes alike."""
    kept = store(max_responses=4)
    await kept.put("blue", "b", response("b"))
    for number in range(10):
        await kept.put("red", f"r{number}", response(f"r{number}"))
    assert await kept.get("blue", "b") is not None
    assert [number for number in range(10) if await kept.get("red", f"r{number}")] == [7, 8, 9]
    size = len(encode(response("a", "x" * 50)))
    kept = store(max_bytes=4 * size)
    await kept.put("blue", "b", response("b", "x" * 50))
    for name in "cdefgh":
        await kept.put("red", name, response(name, "x" * 50))
    assert await kept.get("blue", "b") is not None
    await kept.put("blue", "large", response("large", "x" * 3 * size))
    assert [name for name in "cdefgh" if await kept.get("red", name)] == ["f", "g", "h"]


async def test_the_least_recently_used_goes_first() -> None:
    """This happens with too many, or too many bytes; one that alone is too large isn't kept."""
    kept = store(max_responses=2)
    for name in ("a", "b"):
        await kept.put("t", name, response(name))
    await kept.get("t", "a")
    await kept.put("t", "c", response("c"))
    assert await kept.get("t", "b") is None
    size = len(encode(response("a", "x" * 50)))
    kept = store(max_bytes=2 * size)
    for name in ("a", "b", "c"):
        await kept.put("t", name, response(name, "x" * 50))
    assert await kept.get("t", "a") is None
    await kept.put("t", "d", response("d", "x" * 500))
    assert await kept.get("t", "d") is None
    assert await kept.get("t", "b") is not None
    assert await kept.get("t", "c") is not None


async def test_a_store_of_none_keeps_none() -> None:
    """``max_stored_responses: 0``."""
    kept = store(max_responses=0)
    await kept.put("t", "a", response("a"))
    assert await kept.get("t", "a") is None


_KEYS = st.tuples(st.sampled_from("tu"), st.sampled_from("abcd"))


@given(st.lists(st.tuples(st.sampled_from(["put", "get", "delete"]), _KEYS, st.integers(0, 60))))
async def test_the_bounds_always_hold(steps: list[tuple[str, tuple[str, str], int]]) -> None:
    """A found response fits and is the last one put, whatever is put, read and deleted."""
    kept = store(max_responses=3, max_bytes=400)
    latest: dict[tuple[str, str], StoredResponse] = {}
    for action, key, size in steps:
        if action == "put":
            latest[key] = response(key[1], "x" * size)
            await kept.put(*key, latest[key])
        elif action == "get":
            assert await kept.get(*key) in (None, latest.get(key))
        else:
            await kept.delete(*key)
            latest.pop(key, None)
    found = [one for key in latest if (one := await kept.get(*key)) is not None]
    assert len(found) <= 3
    assert sum(len(encode(one)) for one in found) <= 400
    assert all(one in latest.values() for one in found)
