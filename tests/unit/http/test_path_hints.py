"""Paths that aren't there: the answer says what to change in the client, in its API's shape."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.routing import Mount
from support.fake_engine import JSON, MODEL, FakeEngine, proxy_before

from leyline_lab.stand_ins.serving import serving
from leyline_proxy.http.app import create_app
from leyline_proxy.http.path_hints import KnownPaths, hint, is_gemini
from leyline_proxy.settings import Settings
from leyline_proxy.upstream.embedded import ASGIStreamTransport, lifespan_of

GEMINI = [
    "/v1beta/models/gemini-3-pro:generateContent",
    "/v1beta/models/gemini-3-pro:streamGenerateContent",
    "/v1/v1beta/models/gemini-3-pro:generateContent",
    "/v1/models/gemini-3-pro:countTokens",
    "/v1beta/models",
]


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/v1/v1/chat/completions", "set its base URL without it (got /v1/v1)"),
        ("/v1/v1/v1/models", "set its base URL without it (got /v1/v1/v1)"),
        ("/chat/completions", "must end in /v1: the path is /v1/chat/completions"),
        ("/messages", "must end in /v1: the path is /v1/messages"),
        ("/api/chat", "Ollama's own API"),
        ("/v1/api/tags", "Ollama's own API"),
        ("/somewhere", "The API starts at /v1."),
        *((path, "Google's Gemini API") for path in GEMINI),
    ],
)
async def test_an_unknown_path_says_what_to_change(path: str, told: str) -> None:
    """The hint is in the answer, whichever part of the proxy refuses the path."""
    assert told in hint(path)
    async with proxy_before(FakeEngine()) as http:
        answer = await http.post(path, json={})
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert told in error["message"]
    assert ("status" in error) is is_gemini(path)


@pytest.mark.parametrize("path", GEMINI)
async def test_gemini_clients_get_googles_shape(path: str) -> None:
    """Their SDKs read code, message and status."""
    async with proxy_before(FakeEngine()) as http:
        error = (await http.post(path, json={})).json()["error"]
    assert (error["code"], error["status"]) == (404, "NOT_FOUND")


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/x", "/v1/chat/completions", "/v1beta"])
def test_other_paths_are_not_googles(path: str) -> None:
    """Paths of the APIs here keep their own shape of errors."""
    assert not is_gemini(path)


CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
WRONG = [
    (f"{CHAT}/", CHAT),
    (f"/{CHAT}", CHAT),
    (f"//{CHAT}//", CHAT),
    ("/v1//chat//completions", CHAT),
    ("/V1/Chat/Completions", CHAT),
    ("/v1/chat/completion", CHAT),
    ("/v1/chat/completitions", CHAT),
    ("/openai/v1/chat/completions", CHAT),
    ("/openai/deployments/gpt/chat/completions", CHAT),
    ("/v1/v1/chat/completions/", CHAT),
    ("/v1/v1/messages", MESSAGES),
    ("/anthropic/v1/messages", MESSAGES),
    (f"/{MESSAGES}", MESSAGES),
    (f"{MESSAGES}/", MESSAGES),
    (f"{MESSAGES}/count_token", f"{MESSAGES}/count_tokens"),
    (f"{RESPONSES}/", RESPONSES),
    ("/api/v1/responses", RESPONSES),
    ("/embeddings/", "/v1/embeddings"),
]


@pytest.mark.parametrize("passing", ["off", "stateless"])
async def test_the_path_that_may_be_meant_is_named(passing: str) -> None:
    """With its method, in the shape of its API; nobody is redirected, and no engine is asked."""
    engine = FakeEngine()
    statuses = (404, 403) if passing == "stateless" else (404,)
    async with proxy_before(engine, pass_through=passing) as http:
        for path, meant in WRONG:
            answer = await http.post(f"http://localhost{path}", json={"model": MODEL})
            document = answer.json()
            assert answer.status_code in statuses, path
            there = passing != "off" or meant != "/v1/embeddings"
            assert (f"Did you mean POST {meant}?" in document["error"]["message"]) is there, path
            assert (document.get("type") == "error") is meant.startswith(MESSAGES), path
            assert "location" not in answer.headers
    assert engine.bodies == []


METHODS = [
    ("GET", MESSAGES, "POST"),
    ("PUT", CHAT, "POST"),
    ("OPTIONS", "/v1/completions", "POST"),
    ("PUT", "/v1/leyline/claims", "GET, POST"),
    ("POST", "/v1/leyline/claims/a", "DELETE, GET, PATCH"),
    ("DELETE", "/v1/leyline/sessions", "GET"),
    ("POST", "/healthz", "GET"),
]


@pytest.mark.parametrize("passing", ["off", "stateless", "all"])
async def test_another_method_is_answered_with_those_of_the_path(passing: str) -> None:
    """All of them, in the text and the header, whether other paths pass or not."""
    async with proxy_before(FakeEngine(), pass_through=passing) as http:
        for method, path, allowed in METHODS:
            answer = await http.request(method, path)
            assert (answer.status_code, answer.headers["allow"]) == (405, allowed), path
            told = f"{method} is not possible on {path}. It takes {allowed}."
            assert told in answer.json()["error"]["message"]


async def test_little_of_a_callers_path_is_shown() -> None:
    """However long it is, and whatever characters it has."""
    async with proxy_before(FakeEngine()) as http:
        for start in ("/", "/v1/"):
            answer = await http.post(start + "%F0%9F%98%80%0a" * 2000, json={})
            assert answer.status_code in (403, 404)
            assert len(answer.content) < 6000
            assert all(32 <= byte < 127 or byte > 127 for byte in answer.content)


async def test_a_mounted_application_knows_its_own_paths() -> None:
    """A prefix in front of them changes neither the hint nor the shape."""
    app = create_app(Settings(log_level="error"), engine_app=FakeEngine())
    host = Starlette(routes=[Mount("/below", app)])
    transport = ASGIStreamTransport(host)
    async with (
        lifespan_of(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=JSON) as http,
    ):
        missing = await http.post("/below//v1/messages", json={})
        method = await http.put("/below/v1/messages", json={})
    assert "Did you mean POST /v1/messages?" in missing.json()["error"]["message"]
    assert method.headers["allow"] == "POST"
    assert missing.json()["type"] == method.json()["type"] == "error"


@pytest.mark.parametrize("stream", [False, True])
def test_the_sdks_show_the_path_that_is_meant(stream: bool) -> None:
    """A base URL with a slash or a /v1 too many is a 404 whose message names the right path."""
    asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Hi."}]}
    app = create_app(Settings(log_level="error"), engine_app=FakeEngine())
    with serving(app) as origin:
        o = openai.OpenAI(base_url=f"{origin}//v1", api_key="k", max_retries=0)
        with pytest.raises(openai.NotFoundError, match="Did you mean POST /v1/chat/completions"):
            o.chat.completions.create(**asked, stream=stream)
        with pytest.raises(openai.NotFoundError, match="Did you mean POST /v1/responses"):
            o.responses.create(model=MODEL, input="Hi.", stream=stream)
        a = anthropic.Anthropic(base_url=f"{origin}/v1", api_key="k", max_retries=0)
        with pytest.raises(anthropic.NotFoundError, match="Did you mean POST /v1/messages") as told:
            a.messages.create(**asked, max_tokens=9, stream=stream)
    assert told.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]


@given(st.text(max_size=300))
def test_any_path_has_a_hint(path: str) -> None:
    """A path that is there is its own nearest, and no other path is taken for one that is there."""
    known = KnownPaths(
        [("/v1/a", ["GET"]), ("/v1/a/{name}", ["GET"]), ("/v1/b/{rest:path}", ["PUT"])]
    )
    assert hint(f"/{path}", known)
    assert known.nearest("POST", "/V1//a/") == "GET /v1/a"
    assert (known.allowed(f"/v1/a/{path}") == ["GET"]) is bool(path and "/" not in path)
    if path and "\n" not in path:
        assert known.allowed(f"/v1/b/{path}") == ["PUT"]
