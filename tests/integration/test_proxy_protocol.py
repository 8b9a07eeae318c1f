"""The proxy before a scripted engine: bytes, headers, streams, errors and metrics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from support.fake_engine import (
    CAPABILITY,
    DONE,
    JSON,
    MODEL,
    Answer,
    FakeEngine,
    chat_json,
    chat_stream,
    chunk,
)
from support.metrics_page import metric
from support.sse import sse

from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings
from leyline_proxy.upstream.embedded import ASGIStreamTransport, lifespan_of

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi."}]
CANARY = "canary-7f3a"


@pytest.fixture
def engine() -> FakeEngine:
    """A scripted Leyline engine without a renderer."""
    return FakeEngine()


@asynccontextmanager
async def proxy(engine: FakeEngine, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a running proxy before ``engine``."""
    settings = Settings(handshake_retry_s=0.05, **options)
    app = create_app(settings, engine_app=engine)
    async with lifespan_of(app), client_of(app) as client:
        yield client


def client_of(app: FastAPI) -> httpx.AsyncClient:
    """A client that streams and disconnects, which httpx's own ASGI transport can't."""
    return httpx.AsyncClient(
        transport=ASGIStreamTransport(app), base_url="http://localhost", headers=JSON
    )


def body(**members: Any) -> dict[str, Any]:
    """A minimal chat request."""
    return {"model": MODEL, "messages": MESSAGES, **members}


async def test_an_unedited_body_goes_up_byte_for_byte(engine: FakeEngine) -> None:
    """Odd spacing, escapes, number formats, order and unknown members all survive."""
    raw = (
        b'{ "temperature" : 1.0e0,\n"unknown":{"b":1,"a":[1 ,2]},"messages":[ {"content":"\\u00e9",'
        b'"role":"user","cache_control":{"type":"ephemeral"}} ] , "model":"fake-model" }'
    )
    async with proxy(engine) as client:
        response = await client.post(CHAT, content=raw)
    assert response.status_code == 200
    sent = engine.bodies[0]
    before, after = raw[:-2], raw[-2:]
    assert sent.startswith(before + b',"custom_params":{"kv_hints":{')
    assert sent.endswith(after)
    envelope = engine.sent["custom_params"]["kv_hints"]
    assert envelope["protocol_version"] == "0.1"
    payload = envelope["actions"][0]["payload"]
    assert payload["session"] == response.headers["x-leyline-session"]
    assert (payload["scope"], payload["directives"]) == ("default", [])


async def test_a_plain_back_end_gets_the_very_same_bytes() -> None:
    """An engine that isn't Leyline's gets no member that it doesn't know."""
    engine = FakeEngine(capability=None)
    raw = json.dumps(body(n=1)).encode()
    async with proxy(engine) as client:
        response = await client.post(CHAT, content=raw)
        ready = (await client.get("/readyz")).json()
    assert engine.bodies == [raw]
    assert response.headers["x-leyline-outcome"] == "unedited"
    assert ready["ready"] is True
    assert "capability" in ready["upstreams"][0]["obstacle"]


async def test_reserved_members_and_credentials_stay_here(engine: FakeEngine) -> None:
    """Members that the engine trusts are the proxy's to set, and the caller's key goes to no one
    else."""
    reserved = (
        "kv_hints",
        "cache_salt",
        "extra_key",
        "session_id",
        "priority",
        "routed_dp_rank",
        "data_parallel_rank",
        "kv_transfer_params",
        "ec_transfer_params",
        "leyline",
    )
    members: dict[str, Any] = dict.fromkeys(reserved[:-1], "evil") | {"leyline": {}}
    members["custom_params"] = {"kv_hints": "evil"}
    headers = {
        "authorization": "Bearer caller",
        "x-api-key": "caller",
        "cookie": "caller",
        "connection": "x-hop",
        "x-hop": "1",
        "x-mine": "kept",
        "x-leyline-session": "s1",
    }
    steering = ("X-Data-Parallel-Rank", "x-override-priority", "X-Override-Routed-DP-Rank")
    headers |= dict.fromkeys(steering, "1")
    async with proxy(engine, upstream_api_key="own") as client:
        await client.post(CHAT, json=body(**members), headers=headers)
    assert not set(reserved) & engine.sent.keys()
    assert b"evil" not in engine.bodies[0]
    assert b"caller" not in b"".join(f"{item}".encode() for item in engine.headers[0].values())
    assert engine.headers[0]["authorization"] == "Bearer own"
    assert engine.headers[0]["x-mine"] == "kept"
    gone = {"x-hop", "x-leyline-session", *map(str.lower, steering)}
    assert not gone & engine.headers[0].keys()


async def test_headers_go_up_as_the_bytes_they_are(engine: FakeEngine) -> None:
    """Other scripts and repeated headers survive; what any Connection header names does not."""
    title = "Café ☕".encode()
    headers = [
        (b"x-title", title),
        (b"x-many", b"one"),
        (b"X-Many", b"two"),
        (b"connection", b"x-hop"),
        (b"connection", b"keep-alive, X-Other-Hop"),
        (b"x-hop", b"1"),
        (b"x-other-hop", b"1"),
    ]
    async with proxy(engine) as client:
        response = await client.post(CHAT, json=body(), headers=headers)
    assert response.status_code == 200
    sent = engine.raw_headers[0]
    assert [value for name, value in sent if name == b"x-title"] == [title]
    assert [value for name, value in sent if name == b"x-many"] == [b"one", b"two"]
    names = [name for name, _ in sent]
    assert not {b"x-hop", b"x-other-hop"} & set(names)
    assert (names.count(b"accept-encoding"), names.count(b"content-type")) == (1, 1)


async def test_headers_come_down_as_the_bytes_they_are(engine: FakeEngine) -> None:
    """A header of the engine in another script is no reason to fail."""
    answer = chat_json()
    answer.headers["x-note"] = "Café ☕"
    engine.answers.append(answer)
    async with proxy(engine) as client:
        response = await client.post(CHAT, json=body())
    assert response.status_code == 200
    assert (b"x-note", "Café ☕".encode()) in response.headers.raw


@pytest.mark.parametrize("torn", [b"", b"{", b'{"choices":[{"index":0}', b"[]", b'{"id":"x",'])
async def test_a_torn_answer_is_the_engines_fault(engine: FakeEngine, torn: bytes) -> None:
    """A 200 whose body is no whole JSON object is a 502, and the session stays as it was."""
    engine.answers.append(Answer([torn]))
    headers = {"x-leyline-session": "s1"}
    async with proxy(engine) as client:
        response = await client.post(CHAT, json=body(), headers=headers)
        after = await client.post(CHAT, json=body(), headers=headers)
    assert response.status_code == 502
    assert response.json()["error"]["code"] == "upstream_invalid_response"
    assert after.json()["leyline"]["turn_index"] == 0


async def test_numbers_that_json_lacks_pass(engine: FakeEngine) -> None:
    """An engine that writes NaN into its answer is passed on as it is."""
    answer = chat_json()
    answer.chunks = [answer.chunks[0][:-1] + b',"score": NaN}']
    engine.answers.append(answer)
    async with proxy(engine) as client:
        response = await client.post(CHAT, json=body())
    assert response.status_code == 200
    assert b'"score": NaN,"leyline":{' in response.content


async def test_the_answer_carries_the_receipt(engine: FakeEngine) -> None:
    """A whole answer has the account in its body and headers, its other bytes unchanged."""
    answer = chat_json()
    engine.answers.append(answer)
    async with proxy(engine) as client:
        response = await client.post(CHAT, json=body(), headers={"x-leyline-session": "abc"})
    assert response.headers["x-leyline-session"] == "abc"
    assert response.headers["x-leyline-cached-tokens"] == "4"
    assert response.headers["x-leyline-spliced-tokens"] == "0"
    assert response.content.startswith(answer.chunks[0][:-1] + b',"leyline":')
    account = response.json()["leyline"]
    assert account["tokens"] == {
        "prompt": 10, "prefix": 4, "spliced": 0, "reused": 0, "prefilled": 6, "freed": 0
    }  # fmt: skip
    assert (account["outcome"], account["reason"], account["edits"]) == ("unedited", None, [])


async def test_a_stream_passes_untouched_but_for_the_finish_chunk(engine: FakeEngine) -> None:
    """Every event keeps its bytes; the finish chunk gains one member at its end."""
    odd = b'data: {"choices" : [ {"delta":{"content":"\\u00e9"}, "index":0 } ] }\r\n\r\n'
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":10}}\n\n'
    finish = chunk({}, "stop")
    parts = [b": keep-alive\n\n", odd, finish, usage, DONE]
    engine.answers.append(Answer(parts, content_type="text/event-stream"))
    async with proxy(engine) as client:
        response = await client.post(CHAT, json=body(stream=True))
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-leyline-plan"] == "unedited"
    assert "x-leyline-outcome" not in response.headers
    before, after = b"".join(parts[:2]) + finish.rstrip()[:-1], usage + DONE
    assert response.content.startswith(before + b',"leyline":{')
    assert response.content.endswith(b"}\n\n" + after)
    found = response.text.replace("\r\n\r\n", "\n\n").removeprefix(": keep-alive\n\n")
    member = sse(found)[1]["leyline"]
    assert member["tokens"]["prefix"] == 4


async def test_a_stream_of_a_plain_back_end_is_accounted_by_its_usage() -> None:
    """Without receipts, tokens are those of the usage, which comes after the finish chunk."""
    engine = FakeEngine(capability=None)
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 5}}
    last = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
    parts = [chunk({"content": "a"}), chunk({}, "stop"), last, DONE]
    engine.answers.append(Answer(parts, content_type="text/event-stream"))
    async with proxy(engine) as client:
        response = await client.post(CHAT, json=body(stream=True))
        session = response.headers["x-leyline-session"]
        document = (await client.get(f"/v1/leyline/sessions/{session}")).json()
        cached = await metric(client, "leyline_prompt_tokens_total", 'source="cached"')
    assert document["history"][0]["receipt"]["tokens"]["prefix"] == 5
    assert (document["hit_ratio"], cached) == (5 / 9, 5)


async def test_the_first_event_comes_before_the_status(engine: FakeEngine) -> None:
    """A refusal or an early abort in the stream is a real error status."""
    refusal = b'data: {"error":{"message":"too long","type":"BadRequest","code":400}}\n\n'
    abort = b'data: {"error":{"message":"aborted","type":"abort","code":null}}\n\n'
    for part in (refusal, b": ping\n\n" + refusal, abort, b""):
        engine.answers.append(Answer([part], content_type="text/event-stream"))
    async with proxy(engine) as client:
        found = [await client.post(CHAT, json=body(stream=True)) for _ in range(4)]
    assert [response.status_code for response in found] == [400, 400, 503, 502]
    assert found[0].json()["error"]["message"] == "too long"
    assert all("x-leyline-session" in response.headers for response in found)


async def test_engine_errors_keep_their_status_and_words(engine: FakeEngine) -> None:
    """An OpenAI-shaped refusal passes; others are shaped; the proxy's credentials are its own."""
    shaped = b'{"error": {"message": "context too long", "type": "x", "code": "y"}}'
    flat = b'{"object": "error", "message": "flat words"}'
    for status, content in ((400, shaped), (429, flat), (500, b"<html>"), (401, shaped)):
        engine.answers.append(Answer([content], status=status))
    async with proxy(engine) as client:
        found = [await client.post(CHAT, json=body()) for _ in range(4)]
    assert [response.status_code for response in found] == [400, 429, 500, 502]
    assert found[0].content == shaped
    assert found[1].json()["error"]["message"] == "flat words"
    assert found[2].json()["error"]["type"] == "upstream_error"
    assert found[3].json()["error"]["code"] == "upstream_credentials"


async def test_a_broken_stream_ends_with_an_error_event(engine: FakeEngine) -> None:
    """A torn answer is never taken for a whole one, and the session stays as it was."""
    engine.answers.append(
        Answer([chunk({"content": "a"})], content_type="text/event-stream", breaks=True)
    )
    async with proxy(engine) as client:
        response = await client.post(
            CHAT, json=body(stream=True), headers={"x-leyline-session": "s"}
        )
        assert await metric(client, "leyline_requests_total", 'status="502"') == 1
        assert (await client.get("/v1/leyline/sessions/s")).status_code == 404
    last = sse(response.text)[-1]
    assert last["error"]["code"] == "upstream_unreachable"
    assert b"[DONE]" not in response.content


async def test_slow_and_dead_engines_are_named(engine: FakeEngine) -> None:
    """Silence is a 504, a refused connection a 502."""
    engine.answers.append(Answer(hangs=True))
    async with proxy(engine, first_token_timeout_s=0.1) as client:
        slow = await client.post(CHAT, json=body())
    assert (slow.status_code, slow.json()["error"]["code"]) == (504, "upstream_timeout")
    app = create_app(Settings(upstream="http://127.0.0.1:9", connect_timeout_s=0.5))
    async with lifespan_of(app), client_of(app) as client:
        dead = await client.post(CHAT, json=body())
        ready = await client.get("/readyz")
    assert (dead.status_code, dead.json()["error"]["code"]) == (502, "upstream_unreachable")
    for answer in (slow, dead):
        error = answer.json()["error"]
        assert error["upstream"] == "engine"
        assert error["message"].endswith(" Engine: engine.")
    assert ready.status_code == 503
    assert ready.json()["upstreams"][0]["up"] is False


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_leaves_closes_the_upstream(engine: FakeEngine, streamed: bool) -> None:
    """The engine learns of it, the request counts as disconnected, and the session is as before."""
    pieces = [chunk({"content": "a"})] if streamed else []
    kind = "text/event-stream" if streamed else "application/json"
    engine.answers += [chat_json(), Answer(pieces, content_type=kind, hangs=True)]
    headers = {"x-leyline-session": "s"}
    async with proxy(engine) as client:
        await client.post(CHAT, json=body(), headers=headers)
        before = (await client.get("/v1/leyline/sessions/s")).json()
        if streamed:
            request = client.stream("POST", CHAT, json=body(stream=True), headers=headers)
            async with request as response:
                await anext(response.aiter_raw())
        else:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await client.post(CHAT, json=body(), headers=headers)
        assert engine.disconnects == 1
        assert await metric(client, "leyline_requests_total", 'status="disconnected"') == 1
        assert (await client.get("/v1/leyline/sessions/s")).json() == before


async def test_a_missing_receipt_is_counted_and_the_session_goes_on(engine: FakeEngine) -> None:
    """Without a receipt nothing is claimed; the turn is in the history, but no source."""
    engine.gives_receipts = False
    async with proxy(engine) as client:
        response = await client.post(CHAT, json=body(), headers={"x-leyline-session": "s"})
        document = (await client.get("/v1/leyline/sessions/s")).json()
        missing = await metric(client, "leyline_receipts_missing_total")
    assert response.json()["leyline"]["detail"] == "the engine gave no receipt for this request"
    assert (document["turns"], document["retained"], missing) == (1, [], 1)


async def test_the_handshake_waits_for_the_engine(engine: FakeEngine) -> None:
    """Readiness follows the engine up and says why nothing is spliced."""
    engine.capability = None
    engine.models = []
    async with proxy(engine, handshake_interval_s=0.05) as client:
        first = (await client.get("/readyz")).json()["upstreams"][0]
        engine.capability, engine.models = CAPABILITY, [MODEL]
        await asyncio.sleep(0.2)
        second = (await client.get("/readyz")).json()["upstreams"][0]
        splices = await metric(client, "leyline_engine_splices", MODEL)
        document = (await client.get("/leyline/capability")).json()
    assert first["engine"] == "plain"
    assert (second["engine"], second["splices"], splices) == ("fake", False, 0)
    assert second["obstacle"] == "the engine gives no chat template and tokenizer"
    assert (document["splices"], document["unsupported_reason"]) == (False, second["obstacle"])


async def test_tenants_have_keys_and_see_only_their_own(engine: FakeEngine) -> None:
    """Each key opens its tenant's sessions; no key and wrong keys open nothing."""
    keys = ["red:kr", "blue:kb"]
    async with proxy(engine, api_keys=keys) as client:
        red = {"authorization": "Bearer kr"}
        named = {**red, "x-leyline-session": "s"}
        assert (await client.post(CHAT, json=body(), headers=named)).status_code == 200
        for headers in ({}, {"authorization": "Bearer no"}, {"authorization": "Basic kr"}):
            refused = await client.post(CHAT, json=body(), headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                401,
                "invalid_api_key",
            )
        blue = {"api-key": "kb"}
        assert (await client.get("/v1/leyline/sessions/s", headers=red)).status_code == 200
        assert (await client.get("/v1/leyline/sessions/s", headers=blue)).status_code == 404
        assert (await client.get("/v1/leyline/sessions", headers=blue)).json() == {"sessions": []}
        page = (await client.get("/")).text
    assert engine.sent["custom_params"]["kv_hints"]["actions"][0]["payload"]["scope"] == "red"
    assert "<code>s</code>" not in page


async def test_completions_are_forwarded(engine: FakeEngine) -> None:
    """A bare completion goes through unchanged, streamed and not, without an envelope."""
    raw = b'{"model":"fake-model", "prompt":"Say", "priority":9}'
    engine.answers += [Answer([b'{"choices":[]}']), chat_stream("a")]
    streamed_body = b'{"model":"fake-model","stream":true,"prompt":"Say"}'
    async with proxy(engine) as client:
        whole = await client.post("/v1/completions", content=raw)
        streamed = await client.post("/v1/completions", content=streamed_body)
    assert whole.content == b'{"choices":[]}'
    assert json.loads(engine.bodies[0]) == {"model": MODEL, "prompt": "Say"}
    assert engine.bodies[1] == streamed_body
    assert streamed.content == b"".join(chat_stream("a").chunks)


async def test_a_bare_completion_carries_out_no_edits(engine: FakeEngine) -> None:
    """It has no messages, so declared edits are refused by name rather than left out."""
    edits = [{"message": 0, "replacement": "", "mode": "forget"}]
    asked = {"model": MODEL, "prompt": "Say", "leyline": {"edits": edits}}
    async with proxy(engine) as client:
        refused = await client.post("/v1/completions", json=asked)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "leyline.edits")
    assert not engine.bodies


async def test_no_prompt_text_in_logs_metrics_or_sessions(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    """Text of requests stays out of everything that is kept or shown."""
    messages = [{"role": "user", "content": CANARY}]
    engine.answers += [chat_json(), Answer(status=500, chunks=[b"{}"])]
    async with proxy(engine, log_level="debug") as client:
        await client.post(CHAT, json=body(messages=messages), headers={"x-leyline-session": "s"})
        await client.post(CHAT, json=body(messages=messages))
        await client.post(CHAT, content=b'{"messages": "' + CANARY.encode())
        shown = [
            (await client.get(path)).text
            for path in ("/metrics", "/v1/leyline/sessions/s", "/", "/readyz")
        ]
    output = capsys.readouterr()
    assert CANARY not in "".join([*shown, output.out, output.err])


async def test_pages_and_unknown_paths(engine: FakeEngine) -> None:
    """The page at the root holds no data; unknown paths and methods are shaped errors."""
    async with proxy(engine, pass_through="off") as client:
        await client.post(CHAT, json=body(), headers={"x-leyline-session": "<s>"})
        page = await client.get("/")
        missing = await client.get("/v1/nothing")
        method = await client.get(CHAT)
        health = await client.get("/healthz")
        models = await client.get("/v1/models")
    assert page.headers["content-type"].startswith("text/html")
    assert "<s>" not in page.text
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    assert (method.status_code, method.json()["error"]["code"]) == (405, "method_not_allowed")
    assert health.json() == {"status": "ok"}
    assert models.json()["data"][0]["id"] == MODEL
