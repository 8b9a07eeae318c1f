"""Paths below /v1 that the proxy doesn't know."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.types import Receive, Scope, Send
from support.fake_engine import CAPABILITY, JSON, MODEL, FakeEngine, proxy_before

from leyline_engine.contract import Capability
from leyline_lab.stand_ins.serving import serving
from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings
from leyline_proxy.settings.other_paths import STATELESS

CHAT = [{"role": "user", "content": "Hi"}]
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
        answer = await client.post("/v1/embeddings?x=1&y=%20", content=raw, headers=JSON)
        fetched = await client.get("/v1/models/org%2Ffake-model")
    assert (answer.status_code, answer.content) == (200, ANSWER)
    assert answer.headers["x-upstream"] == "yes"
    assert engine.taken[0][:3] == ("POST", "/v1/embeddings?x=1&y=%20", raw)
    assert engine.taken[1][:2] == ("GET", "/v1/models/org/fake-model")
    assert fetched.status_code == 200


async def test_a_body_that_is_no_json_passes_as_it_is() -> None:
    """A form with a file in it, for instance."""
    engine = Upstream()
    async with before(engine) as client:
        form = {"content-type": "multipart/form-data; boundary=x"}
        sent = b"--x\r\n\xff\x00"
        await client.post("/v1/audio/transcriptions", content=sent, headers=form)
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


async def test_what_isnt_known_to_store_nothing_upstream_is_refused() -> None:
    """Callers would act under the operator's key; only the operator can allow it."""
    unlisted = [
        ("GET", "/v1/files"),
        ("GET", "/v1/Files"),
        ("POST", "/v1/files/f-1/content"),
        ("GET", "/v1/batches"),
        ("POST", "/v1/messages/batches"),
        ("GET", "/v1/chat/completions"),
        ("DELETE", "/v1/chat/completions/c-1"),
        ("POST", "/v1/load_lora_adapter"),
        ("DELETE", "/v1/models/ft:gpt-4o:org::1"),
        ("GET", "/v1/organization/users"),
        ("POST", "/v1/organization/admin_api_keys"),
        ("POST", "/v1/realtime/client_secrets"),
        ("GET", "/v1/webhooks"),
        ("POST", "/v1/whatever_comes_next"),
        ("GET", "/v1/embeddings"),
        ("PUT", "/v1/rerank"),
    ]
    engine = Upstream()
    async with before(engine) as client:
        for method, path in unlisted:
            answer = await client.request(method, path)
            assert answer.status_code == 403, path
            assert '"code":"not_passed_through"' in answer.text
    assert engine.taken == []
    async with before(engine, pass_through="all") as client:
        for method, path in unlisted:
            assert (await client.request(method, path)).status_code == 200
    assert [taken[:2] for taken in engine.taken] == unlisted


async def test_a_path_beyond_what_can_be_forwarded_is_the_callers_mistake() -> None:
    """Rewritten it may be three times as long, and longer than clients take."""
    engine = Upstream()
    async with before(engine, pass_through="all") as client:
        answer = await client.get("/v1/a" + "%22" * 21_000)
        assert (await client.get("/v1/a" + "%22" * 10_000)).status_code == 200
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "path_too_long")
    assert len(engine.taken) == 1


async def test_a_path_that_is_written_differently_doesnt_slip_through() -> None:
    """With all paths allowed, some still don't pass: the proxy's own pages, ways out of /v1, and
    those an upstream may read as another path, above all paths whose requests are edited and
    salted."""
    engine = Upstream()
    paths = [
        "/v1/leyline/unknown",
        "/v1/a/%2e%2e/%2e%2e/flush_cache",
        "/v1/files%3Fa",
        "/v1/%2566iles",
        "/v1/%5cfiles",
        "/v1/files%23a",
        "/v1/%2e/files",
        "/v1//files",
        "/v1/chat/completions/",
        "/v1/chat//completions",
        "/v1/messages/",
        "/v1/a%0d%0aHost:%20b",
        "/v1/a%00b",
        "/v1/Chat/Completions",
        "/v1/RESPONSES",
    ]
    async with before(engine, pass_through="all") as client:
        for path in paths:
            answer = await client.post(path, json={})
            assert answer.status_code == 404, path
            assert '"code":"unknown_path"' in answer.text or '"code":"not_found"' in answer.text
    assert engine.taken == []


async def test_a_path_means_the_same_to_the_upstream_as_to_the_proxy() -> None:
    """A slash in a model's name passes, and characters that need it are encoded again."""
    engine = Upstream()
    async with before(engine, pass_through="all") as client:
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
    """JSON from which the proxy can't remove them is refused."""
    engine = Upstream()
    async with before(engine) as client:
        answer = await client.post("/v1/embeddings", content=raw, headers=JSON)
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


PIECES = st.sampled_from(
    [
        "embeddings", "score", "models", "files", "f-1", "organization", "audio", "transcriptions",
        "chat", "completions", "m", "%65mbeddings", "Embeddings", "embeddings%20", "embeddings;x=1",
        "", ".", "..", "%2e%2e", "%252e%252e", "a%2fb", "%2f", "%5c..", "..%2f..%2ffiles", "%00",
        "e\u0301", "embeddings%3fx", "embeddings%23", "v1", "%76%31", "leyline",
    ]
)  # fmt: skip
STARTS = st.sampled_from(["//v1/", "/./v1/", "/v1//", "/V1/", "http://other/v1/", "/v1/../v1/"])
ENDS = st.sampled_from(["/", "?", "?a=/../files", "?/v1/files", "#/v1/files", "%3f", ";", "/x"])


def encoded(text: str, at: int) -> str:
    """One character of it as a server decodes it."""
    at %= len(text)
    return f"{text[:at]}%{ord(text[at]):02x}{text[at + 1 :]}"


LISTED_PATHS = st.sampled_from([each.path.replace("NAME", "org/m") for each in STATELESS])
TWISTED = st.one_of(
    LISTED_PATHS,
    LISTED_PATHS.map(str.capitalize),
    LISTED_PATHS.map(str.upper),
    st.builds(encoded, LISTED_PATHS, st.integers(0, 30)),
    st.builds(lambda path, end: path + end, LISTED_PATHS, ENDS),
    st.builds(lambda path, piece: f"{path}/{piece}", LISTED_PATHS, PIECES),
    st.lists(PIECES, min_size=1, max_size=4).map("/".join),
)
TARGETS = st.builds(
    lambda start, path, end: start + path + end,
    st.just("/v1/") | STARTS,
    TWISTED,
    st.just("") | ENDS,
)
METHODS = st.just("POST") | st.sampled_from(["GET", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"])


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Upstream, str, int]]:
    """An upstream, and the address of a real server before it."""
    engine = Upstream()
    settings = Settings(log_level="error")
    with serving(create_app(settings, engine_app=engine)) as origin:
        host, _, port = origin.removeprefix("http://").partition(":")
        yield engine, host, int(port)


@given(METHODS, TARGETS)
@example("GET", "http://other/v1/files")
@example("POST", "/v1/%65mbeddings")
@example("POST", "/v1/Embeddings")
@example("DELETE", "/v1/models/m")
@example("GET", "/v1/models/../files")
@example("GET", "/v1/models/m/%252e%252e/files")
@example("GET", "/v1/models/m%3b/x")
def test_no_spelling_of_a_target_reaches_what_isnt_listed(
    served: tuple[Upstream, str, int], method: str, target: str
) -> None:
    """The upstream sees a listed method and path, or nothing, whatever line a client writes."""
    engine, host, port = served
    engine.taken.clear()
    head = b"%s %s HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with socket.create_connection((host, port), timeout=5) as connection:
        rest = b"connection: close\r\ncontent-length: 2\r\n\r\n{}"
        connection.sendall(head % (method.encode(), target.encode()) + rest)
        answer = b""
        # A server that refuses the line may close before it has read the rest: a reset.
        with suppress(ConnectionResetError):
            while part := connection.recv(65536):
                answer += part
    passed = bool(engine.taken)
    event(f"passed: {passed}")
    for taken, seen, _, _ in engine.taken:
        path = seen.partition("?")[0]
        assert (taken, path) in LISTED or (taken == "GET" and MODEL_PATH.fullmatch(path)), seen
    assert passed or not answer or answer.split()[1] != b"200" or "/v1/models" in target


LISTED = {(each.method, f"/v1/{each.path}") for each in STATELESS}
MODEL_PATH = re.compile(r"/v1/models/[A-Za-z0-9_.:@+-]+(/[A-Za-z0-9_.:@+-]+)*")


async def test_each_listed_request_passes() -> None:
    """It passes in a proxy as it comes, without keys, and with a form where the API takes one."""
    engine = Upstream()
    async with before(engine) as client:
        for each in STATELESS:
            kind = "multipart/form-data; boundary=x" if each.form else "application/json"
            content = b"" if each.method == "GET" else b"{}"
            answer = await client.request(
                each.method, f"/v1/{each.path}", content=content, headers={"content-type": kind}
            )
            assert answer.status_code == 200, answer.text
    assert [taken[:2] for taken in engine.taken] == [
        (each.method, f"/v1/{each.path}") for each in STATELESS
    ]


@pytest.mark.parametrize("forwards", [True, False])
async def test_who_brings_a_key_of_their_own_sees_what_they_store(forwards: bool) -> None:
    """Under the caller's own key objects are the caller's; what runs an account stays closed."""
    engine = Upstream()
    tenants = {"red": {"api_keys": ["key-red"], "forward_credentials": forwards}}
    own = {"/v1/files", "/v1/chat/completions"}
    async with before(engine, upstream_api_key="up", tenants=tenants) as client:
        for path in (*own, "/v1/organization/users", "/v1/load_lora_adapter"):
            answer = await client.get(path, headers={"authorization": "Bearer key-red"})
            assert answer.status_code == (200 if forwards and path in own else 403), path
    assert {sent["authorization"] for *_, sent in engine.taken} <= {"Bearer key-red"}


PLUGIN = msgspec.structs.replace(CAPABILITY, engine="sglang", isolates=True)


@pytest.mark.parametrize(
    ("capability", "owner", "status"),
    [(PLUGIN, "sglang", 501), (CAPABILITY, "", 501), (None, "sglang", 501), (None, "vllm", 200)],
    ids=["plugin", "shares", "sglang", "vllm"],
)
async def test_what_a_model_reads_here_is_salted_too_or_refused(
    capability: Capability | None, owner: str, status: int
) -> None:
    """``cache_scope: tenant`` holds on every path: by the tenant's salt where engines read it, and
    by a refusal that names the reason where they don't."""
    engine = Upstream()
    engine.capability, engine.owner = capability, owner
    body = {"model": MODEL, "cache_salt": "mine"}
    async with before(engine, cache_scope="tenant", pass_through="all") as client:
        for path in ("/v1/score", "/v1/rerank", "/v1/embeddings", "/v1/unlisted"):
            answer = await client.post(path, json=body)
            assert answer.status_code == status
            assert status == 200 or answer.json()["error"]["code"] == "cache_scope_unsupported"
        await client.post("/v1/chat/completions", json={**body, "messages": CHAT})
    if status == 200:
        salts = {json.loads(sent)["cache_salt"] for _, _, sent, _ in engine.taken}
        assert len(engine.taken) == 5 and len(salts) == 1 and "mine" not in salts
    else:
        assert {target for _, target, *_ in engine.taken} <= {"/v1/chat/completions"}


async def test_only_what_can_carry_a_salt_passes_in_a_scope() -> None:
    """A form or a list can't say whose it is; what no model reads needn't."""
    form = {"content-type": "multipart/form-data; boundary=x"}
    cases: list[tuple[str, bytes, dict[str, str], int, str]] = [
        ("/v1/audio/transcriptions", b"--x", form, 501, "cache_scope_unsupported"),
        ("/v1/unlisted", b"--x", form, 501, "cache_scope_unsupported"),
        ("/v1/score", b"[1]", JSON, 400, "invalid_json"),
        ("/v1/score", '{"a":1}'.encode("utf-16-be"), JSON, 400, "invalid_json"),
        ("/v1/tokenize", b"{}", JSON, 200, ""),
    ]
    engine = Upstream()
    engine.capability = None
    async with before(engine, cache_scope="tenant", pass_through="all") as client:
        for path, content, headers, status, code in cases:
            answer = await client.post(path, content=content, headers=headers)
            assert answer.status_code == status, path
            assert not code or answer.json()["error"]["code"] == code
    assert [(target, body) for _, target, body, _ in engine.taken] == [("/v1/tokenize", b"{}")]
