"""Upstreams that speak the client's own API: what passes as it is, and what is translated."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.types import Receive, Scope, Send
from support.fake_engine import JSON, MODEL, Answer, FakeEngine

from leyline_lab.stand_ins.serving import serving
from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
ASKED = b'{"model" : "fake-model", "max_tokens":5,"messages":[ {"role":"user","content":"Hi"}]}'
STATELESS = b'{"model":"fake-model","store":false, "input":"Hi", "service_tier":"auto"}'
USAGE = {"input_tokens": 3, "cache_read_input_tokens": 7, "output_tokens": 2}
MESSAGE = {
    "id": "msg_up",
    "type": "message",
    "role": "assistant",
    "content": [{"type": "text", "text": "Hello", "citations": None}],
    "usage": USAGE,
    "only_upstream": 1,
}
RESPONSE = {
    "id": "resp_up",
    "object": "response",
    "output": [],
    "usage": {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 7},
        "output_tokens": 2,
    },
}


def event(document: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (document["type"].encode(), json.dumps(document).encode())


EVENTS = [
    event({"type": "message_start", "message": {**MESSAGE, "content": [], "usage": USAGE}}),
    event({"type": "content_block_start", "index": 0, "content_block": {"type": "text"}}),
    event({"type": "content_block_delta", "index": 0, "delta": {"text": "Hello"}}),
    event({"type": "content_block_stop", "index": 0}),
    event({"type": "message_delta", "delta": {}, "usage": {"output_tokens": 2}}),
    event({"type": "message_stop"}),
]
RESPONSE_EVENTS = [
    event({"type": "response.created", "response": {**RESPONSE, "usage": None}}),
    event({"type": "response.output_text.delta", "delta": "Hello"}),
    event({"type": "response.completed", "response": RESPONSE}),
]


class Upstream(FakeEngine):
    """A server of all three APIs, without the Leyline plugin."""

    def __init__(self) -> None:
        super().__init__(capability=None)
        self.taken: list[tuple[str, bytes, dict[str, str]]] = []
        self.status = 200
        self.free = threading.Event()
        self.free.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in (MESSAGES, RESPONSES):
            await super().__call__(scope, receive, send)
            return
        request = Request(scope, receive)
        raw = await request.body()
        self.taken.append((scope["path"], raw, dict(request.headers)))
        native = scope["path"] == MESSAGES
        parts = [json.dumps(MESSAGE if native else RESPONSE).encode()]
        kind = b"application/json"
        if json.loads(raw).get("stream"):
            parts, kind = (EVENTS if native else RESPONSE_EVENTS), b"text/event-stream"
        if self.status != 200:
            error = {"type": "overloaded_error", "message": "Too busy."}
            parts = [json.dumps({"type": "error", "error": error}).encode()]
        headers = [(b"content-type", kind)]
        while not self.free.is_set():  # noqa: ASYNC110 - set by another thread
            await asyncio.sleep(0.01)
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@contextmanager
def before(upstream: Upstream, **settings: Any) -> Iterator[httpx.Client]:
    with serving(upstream) as origin:
        engine = {"url": origin, "apis": ["messages", "responses"], "api_key": "up"}
        app = create_app(Settings(upstreams={"e": engine}, log_level="error", **settings))
        with (
            serving(app) as address,
            httpx.Client(base_url=address, timeout=30, headers=JSON) as client,
        ):
            yield client


def account_of(client: httpx.Client) -> dict[str, Any]:
    (found,) = client.get("/v1/leyline/sessions").json()["sessions"]
    return dict(found)


@pytest.mark.parametrize(
    ("path", "name", "body", "answer"),
    [
        (MESSAGES, "anthropic-version", ASKED, MESSAGE),
        (RESPONSES, "openai-beta", STATELESS, RESPONSE),
    ],
)
def test_a_request_passes_as_it_is_and_its_answer_gets_the_account_alone(
    path: str, name: str, body: bytes, answer: dict[str, Any]
) -> None:
    """Bytes up, members down: nothing of either API is translated, and tokens are counted."""
    upstream = Upstream()
    with before(upstream) as client:
        headers = {"content-type": "application/json", name: "2023-06-01"}
        got = client.post(path, content=body, headers={**headers, "x-api-key": "client's"})
        counted = account_of(client)
    assert got.status_code == 200
    ((taken, raw, sent),) = upstream.taken
    assert (taken, raw) == (path, body)
    assert sent[name] == "2023-06-01"
    assert sent["x-api-key"] == "up", "the client's key stays here"
    document = got.json()
    assert document.pop("leyline")["outcome"] == "unedited"
    assert document == answer
    assert (counted["prompt_tokens"], counted["cached_tokens"]) == (10, 7)


@pytest.mark.parametrize(
    ("path", "body", "events", "ends"),
    [(MESSAGES, ASKED, EVENTS, 4), (RESPONSES, STATELESS, RESPONSE_EVENTS, 2)],
)
def test_a_stream_passes_as_it_is_with_the_account_in_its_last_word(
    path: str, body: bytes, events: list[bytes], ends: int
) -> None:
    """Every event keeps its bytes; the one that ends the answer has a member more."""
    upstream = Upstream()
    asked = body[:-1] + b',"stream":true}'
    with before(upstream) as client:
        got = client.post(path, content=asked)
        counted = account_of(client)
    assert upstream.taken[0][1] == asked
    received = [part + b"\n\n" for part in got.content.split(b"\n\n")[:-1]]
    assert received[:ends] == events[:ends]
    assert received[ends + 1 :] == events[ends + 1 :]
    last = json.loads(received[ends].partition(b"data: ")[2])
    assert last.pop("leyline")["outcome"] == "unedited"
    assert last == json.loads(events[ends].partition(b"data: ")[2])
    assert (counted["prompt_tokens"], counted["cached_tokens"]) == (10, 7)


@pytest.mark.parametrize("status", [200, 503])
@pytest.mark.parametrize(
    ("path", "body", "ping"),
    [
        (MESSAGES, ASKED, b'event: ping\ndata: {"type":"ping"}\n\n'),
        (RESPONSES, STATELESS, b": ping\n\n"),
    ],
)
def test_a_silent_upstream_opens_its_answer_itself(
    path: str, body: bytes, ping: bytes, status: int
) -> None:
    """Meanwhile there are pings alone; if it fails, the answer opens with the failure."""
    upstream = Upstream()
    upstream.free.clear()
    upstream.status = status
    with before(upstream, stream_ping_interval_s=0.02) as client:
        streamed = body.replace(b"{", b'{"stream": true, ', 1)
        with client.stream("POST", path, content=streamed) as answer:
            parts = answer.iter_raw()
            seen = next(parts)
            while seen.count(b"ping\n") < 2:
                seen += next(parts)
            upstream.free.set()
            rest = b"".join(parts).replace(ping, b"")
    assert seen.replace(ping, b"") == b""
    kinds = [line[7:].decode() for line in rest.splitlines() if line.startswith(b"event: ")]
    if status == 200:
        given = EVENTS if path == MESSAGES else RESPONSE_EVENTS
        assert kinds == [each.partition(b"\n")[0][7:].decode() for each in given]
    elif path == MESSAGES:
        assert kinds == ["error"]
    else:
        opening = ["response.created", "response.in_progress"]
        assert kinds == [*opening, "error", "response.failed"]
    assert [each[0] for each in upstream.taken] == [path]


class Failing(FakeEngine):
    """A server of chat alone, which breaks off each answer once ``free`` is set."""

    def __init__(self) -> None:
        super().__init__(capability=None)
        self.free = threading.Event()

    async def complete(self, request: Request, receive: Receive, send: Send) -> None:
        """Answer a completion."""
        while not self.free.is_set():  # noqa: ASYNC110 - set by another thread
            await asyncio.sleep(0.01)
        self.answers = [Answer(content_type="text/event-stream")]
        await super().complete(request, receive, send)


def test_an_answer_that_was_opened_here_goes_on_in_chat() -> None:
    """Another engine that speaks the client's API would open it again, under another id."""
    first, second = Failing(), Upstream()
    with serving(first) as one, serving(second) as other:
        engines = {"a": {"url": one}, "b": {"url": other, "apis": ["responses"]}}
        settings = Settings(upstreams=engines, log_level="error", stream_ping_interval_s=0.02)
        app = create_app(settings)
        with (
            serving(app) as address,
            httpx.Client(base_url=address, timeout=30, headers=JSON) as client,
        ):
            streamed = STATELESS.replace(b"{", b'{"stream": true, ', 1)
            # Some sessions are the second engine's.
            for name in "abcdefghijklmnop":
                first.free.clear()
                headers = {"x-leyline-session": name}
                with client.stream("POST", RESPONSES, content=streamed, headers=headers) as answer:
                    parts = answer.iter_raw()
                    seen = next(parts)
                    first.free.set()
                    seen += b"".join(parts)
                if first.bodies:
                    break
    assert first.bodies and second.bodies
    assert seen.count(b"event: response.created") == 1
    assert b"event: response.completed" in seen


def test_what_nobody_has_searched_does_not_pass() -> None:
    """If secrets are taken out, a request isn't passed on with parts that have no place in chat
    messages, found or not; a dry run takes none out."""
    upstream = Upstream()
    text = {"type": "text", "text": "see", "citations": [{"cited_text": "key=7391"}]}
    body = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": [text]}]}
    with before(upstream, policy=r"redact:pattern='key=\d+'") as client:
        assert client.post(MESSAGES, json=body).status_code == 200
        assert upstream.taken == []
        assert b"7391" not in upstream.bodies[-1]
        dry = {"policy": r"redact:pattern='key=\d+',dry_run=true"}
        assert client.post(MESSAGES, json={**body, "leyline": dry}).status_code == 200
    assert len(upstream.taken) == 1


def test_an_edited_request_is_translated_instead() -> None:
    """A policy's edit is made to chat messages, so that is how the request goes up."""
    upstream = Upstream()
    message = {"role": "user", "content": "my key=7391 is secret"}
    body = {"model": MODEL, "max_tokens": 5, "messages": [message]}
    with before(upstream, policy=r"redact:pattern='key=\d+',replacement='[gone]'") as client:
        got = client.post(MESSAGES, json=body)
    assert got.status_code == 200
    assert got.json()["content"][0]["text"] == "Hello."
    assert upstream.taken == []
    assert "[gone]" in upstream.bodies[0].decode() and "7391" not in upstream.bodies[0].decode()


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"store": True},
        {"store": False, "stored": True},
        {"store": False, "input": [{"type": "item_reference", "id": "stored"}]},
    ],
)
def test_a_response_that_is_stored_is_translated_and_kept_here(more: dict[str, Any]) -> None:
    """Stored responses are kept apart by tenant, which the upstream can't do."""
    upstream = Upstream()
    body: dict[str, Any] = {"model": MODEL, "input": "Hi", **more}
    with before(upstream) as client:
        if body.pop("stored", False):
            first = client.post(RESPONSES, json={"model": MODEL, "input": "Hi"}).json()
            body["previous_response_id"] = first["id"]
        if isinstance(body["input"], list):
            first = client.post(RESPONSES, json={"model": MODEL, "input": "Hi"}).json()
            body["input"][0]["id"] = first["output"][0]["id"]
        got = client.post(RESPONSES, json=body)
    assert got.status_code == 200, got.text
    assert upstream.taken == []


def test_a_request_that_says_two_things_is_translated() -> None:
    """An upstream may take either of two equal members, so it gets neither unchanged."""
    upstream = Upstream()
    raw = STATELESS[:-1] + b',"previous_response_id":"resp_x","previous_response_id":null}'
    with before(upstream) as client:
        got = client.post(RESPONSES, content=raw)
    assert got.status_code == 200, got.text
    assert upstream.taken == []


def test_an_upstreams_own_error_is_passed_on() -> None:
    """Its status and words reach the client in the shape of the client's API."""
    upstream = Upstream()
    upstream.status = 529
    with before(upstream) as client:
        got = client.post(MESSAGES, content=ASKED)
    assert got.status_code == 529
    assert got.json()["error"]["message"] == "Too busy."
    assert got.json()["type"] == "error"


def test_an_upstream_that_doesnt_say_so_is_spoken_to_in_chat() -> None:
    """Without the setting nothing passes natively."""
    upstream = Upstream()
    with (
        serving(upstream) as origin,
        serving(create_app(Settings(upstream=origin, log_level="error"))) as address,
    ):
        assert httpx.post(f"{address}{MESSAGES}", content=ASKED, headers=JSON).status_code == 200
    assert upstream.taken == [] and len(upstream.bodies) == 1


@pytest.mark.parametrize("path", [MESSAGES, "/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("forwards", [False, True])
def test_a_clients_key_goes_upstream_only_for_a_tenant_that_wants_it(
    path: str, forwards: bool
) -> None:
    """By default the proxy's own key goes up; where it is asked for, the client's alone does."""
    upstream = Upstream()
    tenants = {"red": {"api_keys": ["key-red"], "forward_credentials": forwards}}
    body = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
    with before(upstream, tenants=tenants) as client:
        got = client.post(path, json={**body, "prompt": "Hi"}, headers={"x-api-key": "key-red"})
    assert got.status_code == 200, got.text
    sent = upstream.taken[0][2] if upstream.taken else upstream.headers[0]
    keys = {sent.get("x-api-key"), sent.get("authorization")} - {None}
    own = {"Bearer up", "up"} if path == MESSAGES else {"Bearer up"}
    assert keys == ({"key-red"} if forwards else own)


@pytest.mark.parametrize("asks", [True, False])
def test_compactions_are_the_proxys_own(asks: bool) -> None:
    """A request that asks for a compaction, or carries one, isn't passed on as it is."""
    block = {"type": "compaction", "content": "All is well."}
    said: Any = "Hello." if asks else [block]
    given: dict[str, Any] = {"model": MODEL, "max_tokens": 5}
    given["messages"] = [{"role": "user", "content": said}]
    if asks:
        given["context_management"] = {"edits": [{"type": "compact_20260112"}]}
    upstream = Upstream()
    with before(upstream) as client:
        assert client.post(MESSAGES, json=given).json()["content"][0]["text"] == "Hello."
    assert upstream.taken == []
