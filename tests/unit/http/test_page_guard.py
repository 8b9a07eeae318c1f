"""The limits of web pages against a proxy without keys."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from support.fake_engine import MODEL, FakeEngine, proxy_before

from leyline_proxy.http.admin import create_admin_app
from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings
from leyline_proxy.upstream.embedded import ASGIStreamTransport

CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}
BODY = b'{"model":"%s","messages":[{"role":"user","content":"Hi"}]}' % MODEL.encode()
READ = [
    "/",
    "/live/app.js",
    "/v1/leyline/live",
    "/v1/leyline/sessions",
    "/v1/leyline/claims",
    "/v1/models",
    "/v1/models/x",
    "/metrics",
    "/leyline/capability",
    "/openapi.json",
    "/nowhere",
]
WRITTEN = [
    CHAT,
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/leyline/claims",
    "/v1/leyline/count_tokens",
    "/v1/embeddings",
    "/nowhere",
]


@asynccontextmanager
async def open_proxy(**settings: Any) -> AsyncIterator[tuple[httpx.AsyncClient, FakeEngine]]:
    engine = FakeEngine()
    async with proxy_before(engine, log_level="error", **settings) as client:
        del client.headers["content-type"]
        yield client, engine


FOREIGN: list[tuple[dict[str, str], str]] = [
    ({"host": "evil.test"}, "host_not_allowed"),
    ({"host": "localhost.evil.test:8790"}, "host_not_allowed"),
    ({"host": ""}, "host_not_allowed"),
    ({"host": "evil.test", "origin": "http://evil.test"}, "host_not_allowed"),
    ({"sec-fetch-site": "cross-site"}, "cross_site_request"),
    ({"origin": "https://evil.test"}, "origin_not_allowed"),
    ({"origin": "http://localhost:3000"}, "origin_not_allowed"),
    ({"origin": "null"}, "origin_not_allowed"),
]


async def test_a_page_of_another_site_reads_and_writes_nothing() -> None:
    """Every path of the proxy is closed to it, and the engine sees nothing."""
    async with open_proxy() as (client, engine):
        for headers in ({"host": "evil.test"}, {"sec-fetch-site": "cross-site"}):
            for path in READ:
                assert (await client.get(path, headers=headers)).status_code == 403, path
            for path in WRITTEN:
                refused = await client.post(path, headers={**JSON, **headers}, content=BODY)
                assert refused.status_code == 403, path
    assert engine.bodies == []


async def test_a_refusal_names_the_header_and_the_way_out() -> None:
    """It has the shape of the API that was called."""
    async with open_proxy() as (client, engine):
        for headers, code in FOREIGN:
            refused = await client.get("/v1/leyline/sessions", headers=headers)
            assert refused.status_code == 403, headers
            error = refused.json()["error"]
            assert (error["code"], error["type"]) == (code, "permission_error")
            assert error["param"] in headers and "configure API keys" in error["message"]
            refused = await client.post("/v1/messages", headers={**JSON, **headers}, content=BODY)
            assert refused.json()["error"]["type"] == "permission_error"
            assert refused.json()["leyline"]["code"] == code
    assert engine.bodies == []


async def test_what_any_page_could_send_without_asking_is_refused() -> None:
    """A body of another type than JSON, or of none, runs no chat and takes no claim, in whatever
    way its length is given."""
    async with open_proxy() as (client, engine):
        for path in WRITTEN:
            for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data",
                         "text/plain; application/json", "application/jsonp", None):  # fmt: skip
                typed = {} if kind is None else {"content-type": kind}
                refused = await client.post(path, headers=typed, content=BODY)
                assert refused.status_code == 415, path
                assert '"code":"unsupported_media_type"' in refused.text
        streamed = await client.post(CHAT, content=_pieces(BODY))
        assert streamed.status_code == 415
        twice = [("content-type", "application/json"), ("content-type", "text/plain")]
        assert (await client.post(CHAT, headers=twice, content=BODY)).status_code == 415
        assert engine.bodies == []
        kind = "Application/JSON ; charset=utf-8"
        taken = await client.post(CHAT, headers={"content-type": kind}, content=BODY)
        assert taken.status_code == 200, taken.text
        assert (await client.delete("/v1/responses/unknown")).status_code == 404
        assert (await client.patch("/v1/leyline/claims/c", content=BODY)).status_code == 415


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    yield body


@pytest.mark.parametrize(
    ("headers", "settings"),
    [
        ({}, {}),
        ({"host": "127.0.0.1:8790", "origin": "http://127.0.0.1:8790"}, {}),
        ({"sec-fetch-site": "same-origin"}, {}),
        ({"sec-fetch-site": "none"}, {}),
        ({"host": "leyline:8790"}, {"allowed_hosts": "gpu1, leyline"}),
        ({"host": "10.1.2.3:8790"}, {"host": "0.0.0.0"}),  # noqa: S104
        ({"host": "10.1.2.3:8790"}, {"host": "10.1.2.3"}),
        (
            {"origin": "https://ui.test", "sec-fetch-site": "cross-site"},
            {"allowed_hosts": ["ui.test"]},
        ),
    ],
)
async def test_who_may_is_served_as_ever(headers: Mapping[str, str], settings: Any) -> None:
    """Programs on this machine, the proxy's own page, and what the operator named."""
    async with open_proxy(**settings) as (client, engine):
        assert (await client.get("/v1/leyline/sessions", headers=headers)).status_code == 200
        answer = await client.post(CHAT, headers={**JSON, **headers}, content=BODY)
    assert answer.status_code == 200, answer.text
    assert len(engine.bodies) == 1


async def test_probes_come_by_address_or_by_no_name_but_from_no_page() -> None:
    """Kubernetes asks a pod by its address, and some load balancers name no host at all; a page can
    do neither."""
    async with open_proxy() as (client, _):
        for path in ("/healthz", "/readyz"):
            for host in ("10.1.2.3:8790", "[fd00::1]:8790"):
                assert (await client.get(path, headers={"host": host})).status_code == 200
            assert (await client.get(path, headers={"origin": "null"})).status_code == 403
            assert (await client.post(path, headers={"host": "10.1.2.3"})).status_code == 403
        named = {"host": "pod.example"}
        assert (await client.get("/healthz", headers=named)).status_code == 200
        assert (await client.get("/readyz", headers=named)).status_code == 403
        for path, status in (("/healthz", 200), ("/readyz", 200), ("/metrics", 403)):
            assert (await _as_written(client, path, [])).status_code == status


async def test_a_request_must_have_one_host() -> None:
    """No API's client leaves it out, and of two a page could have written one."""
    async with open_proxy() as (client, _):
        for hosts in ([], ["localhost", "evil.test"], ["evil.test", "localhost"]):
            assert (await _as_written(client, "/v1/models", hosts)).status_code == 403


async def _as_written(client: httpx.AsyncClient, path: str, hosts: list[str]) -> httpx.Response:
    """The answer to a request with these hosts and no other header."""
    request = httpx.Request("GET", f"http://localhost{path}")
    request.headers = httpx.Headers([("host", host) for host in hosts])
    return await client.send(request)


async def test_a_link_on_any_page_opens_the_live_page_and_nothing_else() -> None:
    """The page itself holds no data; what a navigation could show elsewhere stays closed."""
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    async with open_proxy() as (client, _):
        assert (await client.get("/", headers=link)).status_code == 200
        embedded = {**link, "sec-fetch-mode": "no-cors"}
        assert (await client.get("/", headers=embedded)).status_code == 403
        for path in ("/v1/leyline/sessions", "/metrics", "/readyz"):
            assert (await client.get(path, headers=link)).status_code == 403


async def test_forms_are_taken_where_the_api_takes_files() -> None:
    """They also pass if the operator lets all paths pass; never where a form could be a chat or a
    claim."""
    form = {"content-type": "multipart/form-data; boundary=x"}
    async with open_proxy() as (client, _):
        transcribed = await client.post("/v1/audio/transcriptions", headers=form, content=b"--x")
        stored = await client.post("/v1/files", headers=form, content=b"--x")
    assert (transcribed.status_code, stored.status_code) == (404, 415)  # the engine has none
    async with open_proxy(pass_through="all") as (client, engine):
        assert (await client.post("/v1/files", headers=form, content=b"--x")).status_code == 404
        for path in (CHAT, "/v1/Chat/Completions", "/v1/leyline/claims", "/v1/chat/x", "/v1//x"):
            assert (await client.post(path, headers=form, content=BODY)).status_code == 415, path
    assert engine.bodies == []


async def test_with_keys_configured_nobody_needs_the_guard() -> None:
    """A browser adds no key of its own accord, so any host, origin and type is taken with one."""
    headers = {"host": "evil.test", "origin": "https://evil.test", "sec-fetch-site": "cross-site"}
    async with open_proxy(api_keys=("red:k1",)) as (client, engine):
        refused = await client.post(CHAT, headers=headers, content=BODY)
        own = {**headers, "authorization": "Bearer k1", "content-type": "text/plain"}
        taken = await client.post(CHAT, headers=own, content=BODY)
    assert (refused.status_code, taken.status_code) == (401, 200)
    assert len(engine.bodies) == 1


async def test_the_admin_api_is_guarded_as_well() -> None:
    """Its own address guards it, beside the key that it always needs."""
    key = "a" * 16
    settings = Settings(admin_key=key, admin_port=1, admin_host="10.1.2.3", log_level="error")
    app = create_app(settings, engine_app=FakeEngine())
    admin = create_admin_app(app.state.services)
    bearer = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(
        transport=ASGIStreamTransport(admin), base_url="http://localhost"
    ) as operator:
        for host, status in (("evil.test", 403), ("10.1.2.3:8791", 200), ("localhost", 200)):
            answer = await operator.get("/admin/tenants", headers={**bearer, "host": host})
            assert answer.status_code == status


@pytest.mark.parametrize("value", ["http://gpu1", "gpu1/", "a b", "gpu1:port", "*"])
def test_a_host_that_is_none_is_refused_at_the_start(value: str) -> None:
    """The message says what is wanted; a star would be a name that nothing has."""
    with pytest.raises(ValueError, match="NAME or NAME:PORT"):
        Settings(allowed_hosts=(value,))
