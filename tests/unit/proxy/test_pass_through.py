"""Paths below /v1 that the proxy doesn't know."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.types import Receive, Scope, Send
from support.fake_engine import MODEL, FakeEngine, proxy_before

ANSWER = b'{ "object":"list" , "data":[ ] }'


class Upstream(FakeEngine):
    """An engine that also takes any other request, and says which it took."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[tuple[str, str, bytes, dict[str, str]]] = []
        self.status = 200
        self.parts: list[bytes] = [ANSWER]
        self.content_type = "application/json"
        self.location = ""
        self.pause_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path.startswith("/leyline") or path == "/v1/models":
            await super().__call__(scope, receive, send)
            return
        request = Request(scope, receive)
        query = scope["query_string"].decode()
        target = f"{path}?{query}" if query else path
        headers = dict(request.headers)
        self.taken.append((request.method, target, await request.body(), headers))
        start: list[tuple[bytes, bytes]] = [
            (b"content-type", self.content_type.encode()),
            (b"x-upstream", b"yes"),
        ]
        if self.location:
            start.append((b"location", self.location.encode()))
        await send({"type": "http.response.start", "status": self.status, "headers": start})
        for part in self.parts:
            await asyncio.sleep(self.pause_s)
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@asynccontextmanager
async def before(engine: Upstream, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with proxy_before(engine, log_level="error", **settings) as client:
        yield client


async def test_an_unknown_path_goes_up_and_comes_back_byte_for_byte() -> None:
    """Method, path, query, body and answer of another API are the upstream's business."""
    engine = Upstream()
    raw = b'{"model" : "fake-model",  "input":["a"],"n":1.0e0}'
    async with before(engine) as client:
        answer = await client.post("/v1/embeddings?x=1&y=%20", content=raw)
        fetched = await client.get("/v1/rerank/status")
    assert (answer.status_code, answer.content) == (200, ANSWER)
    assert answer.headers["x-upstream"] == "yes"
    assert engine.taken[0][:3] == ("POST", "/v1/embeddings?x=1&y=%20", raw)
    assert engine.taken[1][:2] == ("GET", "/v1/rerank/status")
    assert fetched.status_code == 200


async def test_a_body_that_is_no_json_passes_as_it_is() -> None:
    """A form with a file in it, for instance."""
    engine = Upstream()
    async with before(engine) as client:
        await client.post("/v1/audio/transcriptions", content=b"--x\r\n\xff\x00", headers={})
    assert engine.taken[0][2] == b"--x\r\n\xff\x00"


async def test_a_client_cant_reach_the_engine_with_what_only_the_proxy_may_set() -> None:
    """Neither hints nor a salt for the cache pass, and the client's key doesn't either."""
    engine = Upstream()
    sent = {"model": MODEL, "input": "a", "cache_salt": "other", "custom_params": {"kv_hints": {}}}
    async with before(engine, api_keys=("red:k1",)) as client:
        headers = {"authorization": "Bearer k1"}
        await client.post("/v1/embeddings", json=sent, headers=headers)
        refused = await client.post("/v1/embeddings", json=sent)
    ((_, _, body, headers),) = engine.taken
    assert json.loads(body) == {"model": MODEL, "input": "a"}
    assert "authorization" not in headers
    assert refused.status_code == 401


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/files"),
        ("POST", "/v1/files/f-1/content"),
        ("GET", "/v1/batches"),
        ("GET", "/v1/chat/completions"),
        ("DELETE", "/v1/chat/completions/c-1"),
        ("POST", "/v1/load_lora_adapter"),
    ],
)
async def test_what_is_stored_upstream_for_all_is_refused(method: str, path: str) -> None:
    """Tenants would see one another's objects; the operator can allow it."""
    engine = Upstream()
    async with before(engine) as client:
        answer = await client.request(method, path)
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "not_passed_through"
    assert engine.taken == []
    async with before(engine, pass_through="all") as client:
        assert (await client.request(method, path)).status_code == 200


async def test_a_path_beyond_what_can_be_forwarded_is_the_callers_mistake() -> None:
    """Written anew it may be three times as long as it came, and longer than clients take."""
    engine = Upstream()
    async with before(engine) as client:
        answer = await client.get("/v1/a" + "%22" * 21_000)
        assert (await client.get("/v1/a" + "%22" * 10_000)).status_code == 200
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "path_too_long")
    assert len(engine.taken) == 1


@pytest.mark.parametrize("path", ["/v1/leyline/unknown", "/v1/a/%2e%2e/%2e%2e/flush_cache"])
async def test_the_proxys_own_paths_and_ways_out_of_v1_dont_pass(path: str) -> None:
    """An unknown page of the proxy is not found, and nothing above /v1 is reached."""
    engine = Upstream()
    async with before(engine) as client:
        answer = await client.get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] in ("unknown_path", "not_found")
    assert engine.taken == []


@pytest.mark.parametrize(
    "path",
    [
        "/v1/files%3Fa",
        "/v1/%2566iles",
        "/v1/%5cfiles",
        "/v1/files%23a",
        "/v1/%2e/files",
        "/v1//files",
        "/v1/Files",
        "/v1/messages/batches",
        "/v1/chat/completions/",
        "/v1/chat//completions",
        "/v1/messages/",
        "/v1/a%0d%0aHost:%20b",
        "/v1/a%00b",
    ],
)
async def test_a_path_that_is_written_differently_doesnt_slip_through(path: str) -> None:
    """What the upstream may read as a path that doesn't pass, doesn't pass in any spelling."""
    engine = Upstream()
    async with before(engine) as client:
        answer = await client.post(path, json={})
    assert answer.status_code in (403, 404)
    assert engine.taken == []


async def test_a_path_means_the_same_to_the_upstream_as_to_the_proxy() -> None:
    """A slash in a model's name passes, and characters that need it are encoded again."""
    engine = Upstream()
    async with before(engine) as client:
        await client.get("/v1/voices/%C3%A9%20%26+1.5")
        await client.get("/v1/models/org%2Fname?x=%23")
    assert [target for _, target, _, _ in engine.taken] == [
        "/v1/voices/\u00e9 &+1.5",
        "/v1/models/org/name?x=%23",
    ]


@pytest.mark.parametrize(
    "raw",
    [
        b'{"input":NaN,"cache_salt":"other"}',
        '{"input":"a","cache_salt":"other"}'.encode("utf-16"),
        '{"input":"a","cache_salt":"other"}'.encode("utf-8-sig"),
        b'{"cache_salt":"other","input":' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
)
async def test_json_that_only_a_lenient_server_reads_brings_no_reserved_members(raw: bytes) -> None:
    """What the proxy can't take them out of is refused."""
    engine = Upstream()
    async with before(engine) as client:
        answer = await client.post("/v1/embeddings", content=raw)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_json"
    assert engine.taken == []


async def test_a_redirect_to_the_upstreams_own_address_isnt_shown() -> None:
    """A client couldn't follow it, and where engines are is the operator's business."""
    engine = Upstream()
    engine.status, engine.location = 307, "http://engine.embedded/v1/other"
    async with before(engine) as client:
        answer = await client.post("/v1/embeddings", json={})
    assert answer.status_code == 502 and "location" not in answer.headers


async def test_the_whole_answer_has_its_time_limit_here_too() -> None:
    """A pass-through that takes too long in all is cut off."""
    engine = Upstream()
    engine.parts, engine.pause_s = [b"x"] * 100, 0.02
    async with before(engine, total_timeout_s=0.2) as client:
        answer = await client.post("/v1/audio/speech", json={})
    assert b"upstream_total" in answer.content
    assert answer.content.count(b"x") < 50


async def test_nothing_passes_where_it_is_switched_off() -> None:
    """The proxy then has its own paths only."""
    engine = Upstream()
    async with before(engine, pass_through="off") as client:
        answer = await client.post("/v1/embeddings", json={})
    assert answer.status_code == 404 and engine.taken == []


async def test_an_upstreams_refusal_is_passed_on_in_its_own_words() -> None:
    """Status and message of the upstream's error reach the client, in the usual shape."""
    engine = Upstream()
    engine.status, engine.parts = 422, [b'{"detail": "input is too long"}']
    async with before(engine) as client:
        answer = await client.post("/v1/embeddings", json={"model": MODEL})
    assert answer.status_code == 422
    assert answer.json()["error"]["message"] == "input is too long"


async def test_a_stream_is_passed_on_as_it_comes() -> None:
    """Events of an API that the proxy doesn't know aren't held back or changed."""
    engine = Upstream()
    engine.content_type = "text/event-stream"
    engine.parts = [b"data: one\n\n", b"data: two\n\n"]
    async with (
        before(engine) as client,
        client.stream("POST", "/v1/audio/speech", json={"model": MODEL}) as answer,
    ):
        received = [part async for part in answer.aiter_raw()]
    assert b"".join(received) == b"".join(engine.parts)
    assert answer.headers["content-type"].startswith("text/event-stream")
