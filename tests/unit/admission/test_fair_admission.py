"""Fair queueing over HTTP: who runs, who waits, who is refused, and that every place comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from support.fake_engine import MODEL, Answer, FakeEngine, chat_stream, chunk, proxy_before
from support.metrics_page import metric

CHAT = "/v1/chat/completions"
SSE = "text/event-stream"
KEYS = {"api_keys": ["red:kr", "blue:kb"]}


@pytest.fixture
def engine() -> FakeEngine:
    """A scripted engine."""
    return FakeEngine()


def body(text: str = "Hi.", **members: Any) -> dict[str, Any]:
    """A chat request."""
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **members}


def key(value: str) -> dict[str, str]:
    """The header of a key."""
    return {"authorization": f"Bearer {value}"}


async def gauge(client: httpx.AsyncClient, name: str, tenant: str) -> float:
    """A metric of a tenant; 0 where it hasn't any."""
    return await metric(client, f"leyline_{name}{{", f'tenant="{tenant}"')


async def until(client: httpx.AsyncClient, name: str, tenant: str, value: float) -> None:
    """Wait for a metric to have a value."""
    async with asyncio.timeout(5):
        while await gauge(client, name, tenant) != value:  # noqa: ASYNC110 - a metric has no event
            await asyncio.sleep(0.005)


@asynccontextmanager
async def occupied(engine: FakeEngine, client: httpx.AsyncClient, who: str) -> AsyncIterator[None]:
    """A stream that the engine never ends holds a place, until its client goes."""
    engine.answers.insert(0, Answer([chunk({"content": "a"})], content_type=SSE, hangs=True))
    async with client.stream("POST", CHAT, json=body(stream=True), headers=key(who)) as stream:
        await anext(stream.aiter_bytes())
        yield


async def test_a_stream_holds_its_place_until_its_end(engine: FakeEngine) -> None:
    """The next request waits for it, is counted as waiting, and is served when it is over."""
    async with proxy_before(engine, max_concurrent=1, **KEYS) as client:
        async with occupied(engine, client, "kr"):
            assert await gauge(client, "queue_running", "red") == 1
            waits = asyncio.create_task(client.post(CHAT, json=body(), headers=key("kb")))
            await until(client, "queue_waiting", "blue", 1)
            assert (await client.get("/healthz")).status_code == 200
            assert (await client.get("/v1/models", headers=key("kb"))).status_code == 200
            assert not waits.done()
        assert (await waits).status_code == 200
        await until(client, "queue_running", "red", 0)
        assert await gauge(client, "queue_running", "blue") == 0
        assert await gauge(client, "queue_waiting", "blue") == 0
        assert await gauge(client, "queue_seconds_count", "blue") == 1
        assert await gauge(client, "queue_seconds_sum", "blue") > 0


async def test_tenants_take_turns(engine: FakeEngine) -> None:
    """With one free place at a time, one tenant's crowd doesn't hold up another's request."""
    async with proxy_before(engine, max_concurrent=1, **KEYS) as client:
        crowd = []
        async with occupied(engine, client, "kr"):
            for number in range(6):
                crowd.append(
                    asyncio.create_task(
                        client.post(CHAT, json=body(f"red {number}"), headers=key("kr"))
                    )
                )
                await until(client, "queue_waiting", "red", number + 1)
            late = asyncio.create_task(client.post(CHAT, json=body("blue"), headers=key("kb")))
            await until(client, "queue_waiting", "blue", 1)
        answers = await asyncio.gather(*crowd, late)
    assert {answer.status_code for answer in answers} == {200}
    order = [item.partition(b'"content":')[2][1:7] for item in engine.bodies[1:]]
    texts = [text.strip(b'"} ]').decode() for text in order]
    assert texts.index(next(text for text in texts if text.startswith("blue"))) <= 1
    reds = [text for text in texts if text.startswith("red")]
    assert reds == sorted(reds)


async def test_a_queue_has_an_end(engine: FakeEngine) -> None:
    """A request above the queue's limit is refused at once, with a time to come back; other
    tenants' requests still wait."""
    limits = {"red": {"max_queued": 1}}
    async with proxy_before(engine, max_concurrent=1, tenants=limits, **KEYS) as client:
        async with occupied(engine, client, "kr"):
            waits = asyncio.create_task(client.post(CHAT, json=body(), headers=key("kr")))
            await until(client, "queue_waiting", "red", 1)
            refused = await client.post(CHAT, json=body(), headers=key("kr"))
            claude = await client.post("/v1/messages", json={}, headers={"x-api-key": "kr"})
            others = asyncio.create_task(client.post(CHAT, json=body(), headers=key("kb")))
            await until(client, "queue_waiting", "blue", 1)
        assert (await waits).status_code == (await others).status_code == 200
        assert await gauge(client, "limited_requests_total", "red") == 2
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["type"]) == (
        429,
        "queue_full",
        "rate_limit_error",
    )
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert (claude.status_code, claude.json()["error"]["type"]) == (429, "rate_limit_error")


async def test_waiting_has_an_end(engine: FakeEngine) -> None:
    """A request that has waited for as long as it may gets a 503 and leaves no trace in the
    queue."""
    async with proxy_before(engine, max_concurrent=1, queue_timeout_s=0.05, **KEYS) as client:
        async with occupied(engine, client, "kr"):
            late = await client.post(CHAT, json=body(), headers=key("kb"))
            assert await gauge(client, "queue_waiting", "blue") == 0
        assert (late.status_code, late.json()["error"]["code"]) == (503, "queue_timeout")
        assert "retry-after" in late.headers
        assert (await client.post(CHAT, json=body(), headers=key("kb"))).status_code == 200


async def test_who_goes_away_leaves_the_queue_at_once(engine: FakeEngine) -> None:
    """Its request never reaches the engine, and the next one moves up."""
    async with proxy_before(engine, max_concurrent=1, **KEYS) as client:
        async with occupied(engine, client, "kr"):
            goes = asyncio.create_task(client.post(CHAT, json=body("gone"), headers=key("kb")))
            await until(client, "queue_waiting", "blue", 1)
            goes.cancel()
            await until(client, "queue_waiting", "blue", 0)
            stays = asyncio.create_task(client.post(CHAT, json=body("stays"), headers=key("kb")))
            await until(client, "queue_waiting", "blue", 1)
        assert (await stays).status_code == 200
    assert not any(b"gone" in sent for sent in engine.bodies)


async def test_a_tenant_has_a_limit_of_its_own(engine: FakeEngine) -> None:
    """At its limit it waits although the proxy has room, and others don't."""
    limits = {"red": {"max_concurrent": 1, "queue_timeout_s": 0.05}}
    async with (
        proxy_before(engine, tenants=limits, **KEYS) as client,
        occupied(engine, client, "kr"),
    ):
        red = await client.post(CHAT, json=body(), headers=key("kr"))
        blue = await client.post(CHAT, json=body(), headers=key("kb"))
    assert (red.status_code, blue.status_code) == (503, 200)


async def test_every_way_out_gives_the_place_back(engine: FakeEngine) -> None:
    """Refusals, torn streams, bad bodies and clients that go: afterwards all places are free."""
    async with proxy_before(engine, max_concurrent=2, **KEYS) as client:
        torn = Answer([chunk({"content": "a"})], content_type=SSE, breaks=True)
        for answer in (Answer([], status=500), torn, chat_stream("a"), Answer([b"{"])):
            engine.answers.append(answer)
            await client.post(CHAT, json=body(stream=True), headers=key("kr"))
        await client.post(CHAT, content=b"{", headers=key("kr"))
        for _ in range(3):
            async with occupied(engine, client, "kr"):
                pass
        await until(client, "queue_running", "red", 0)
        async with occupied(engine, client, "kr"), occupied(engine, client, "kb"):
            pass


async def test_requests_a_minute_have_a_limit(engine: FakeEngine) -> None:
    """A tenant that has used its requests learns when the next may come; others aren't limited."""
    limits = {"red": {"requests_per_minute": 2}}
    async with proxy_before(engine, tenants=limits, **KEYS) as client:
        red = [await client.post(CHAT, json=body(), headers=key("kr")) for _ in range(3)]
        blue = await client.post(CHAT, json=body(), headers=key("kb"))
    assert [answer.status_code for answer in red] == [200, 200, 429]
    assert red[2].json()["error"]["code"] == "rate_limit_exceeded"
    assert 29 <= int(red[2].headers["retry-after"]) <= 30
    assert blue.status_code == 200


@pytest.mark.parametrize(
    "path",
    ["/v1/leyline/count_tokens", "/v1/messages/count_tokens", "/v1/responses/input_tokens"],
)
async def test_counting_tokens_is_limited_like_answering(engine: FakeEngine, path: str) -> None:
    """It costs the proxy as much, so it counts as a request of the minute."""
    limits = {"red": {"requests_per_minute": 1}}
    asked = body() if "responses" not in path else {"model": MODEL, "input": "Hi."}
    async with proxy_before(engine, tenants=limits, **KEYS) as client:
        answers = [await client.post(path, json=asked, headers=key("kr")) for _ in range(2)]
    assert answers[0].status_code != 429
    assert answers[1].status_code == 429
