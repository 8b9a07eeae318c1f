"""Tenants whose KV is kept apart: what goes upstream, and what is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_engine import CAPABILITY, MODEL, FakeEngine, proxy_before

from leyline_proxy.settings.cache_scope import cache_salt

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
APART = msgspec.structs.replace(CAPABILITY, isolates=True)
KEYS = ("red:key-red", "blue:key-blue")


@asynccontextmanager
async def before(engine: FakeEngine, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    given: dict[str, Any] = {"api_keys": KEYS, "hints_secret": "shared", "log_level": "error"}
    async with proxy_before(engine, **given | settings) as client:
        yield client


async def send(client: httpx.AsyncClient, who: str, path: str = CHAT) -> httpx.Response:
    body = {"model": MODEL, "cache_salt": "mine", "prompt": "Hi"}
    body |= {"messages": [{"role": "user", "content": "Hi"}]}
    return await client.post(path, json=body, headers={"authorization": f"Bearer key-{who}"})


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("capability", [APART, None], ids=["plugin", "plain"])
async def test_each_tenant_has_a_salt_of_its_own_and_no_say_in_it(
    path: str, capability: Any
) -> None:
    """One salt for all requests of a tenant, another for the next; the client's goes nowhere."""
    engine = FakeEngine(capability=capability)
    salts = []
    async with before(engine, cache_scope="tenant") as client:
        for who in ("red", "red", "blue"):
            assert (await send(client, who, path)).status_code == 200
            salts.append(engine.sent["cache_salt"])
    assert salts[0] == salts[1] != salts[2]
    assert "mine" not in salts


async def test_by_default_equal_prefixes_are_shared() -> None:
    """Without the setting no salt goes up; a tenant may ask for it alone."""
    engine = FakeEngine(capability=APART)
    async with before(engine, tenants={"red": {"cache_scope": "tenant"}}) as client:
        await send(client, "blue")
        assert "cache_salt" not in engine.sent
        await send(client, "red")
        assert "cache_salt" in engine.sent


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_an_engine_that_would_share_is_given_nothing(path: str) -> None:
    """A promise that can't be kept is refused by name, before the engine sees the request."""
    engine = FakeEngine()
    async with before(engine, cache_scope="tenant") as client:
        answer = await send(client, "red", path)
    assert answer.status_code == 501
    assert answer.json()["error"]["code"] == "cache_scope_unsupported"
    assert engine.bodies == []


@given(st.text(), st.text(), st.none() | st.text(min_size=1))
def test_salts_tell_tenants_apart_and_nothing_else(
    one: str, other: str, secret: str | None
) -> None:
    """Equal for equal names under one secret, different for different ones."""
    assert (cache_salt(one, secret) == cache_salt(other, secret)) == (one == other)
