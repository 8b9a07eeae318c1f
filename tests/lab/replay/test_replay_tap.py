"""Reading the prompt where the engine reads it."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from leyline_lab.engines.stack import PromptTap, StackOptions
from leyline_lab.errors import AccountError

BODY: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hi " * 50_000}],
    "tools": None,
    "custom_params": {"kv_hints": {}},
}


async def chat(request: Request) -> Response:
    """Answers with the size of what it was sent."""
    return JSONResponse({"size": len(await request.body())})


async def tokenize(request: Request) -> Response:
    """A tokenizer of one token per character; refuses to tokenise nothing."""
    body = await request.json()
    assert set(body) == {"model", "messages"}
    text = body["messages"][0]["content"]
    return JSONResponse({"tokens": [ord(char) for char in text]}, 200 if text else 422)


@pytest.fixture
def tap() -> PromptTap:
    """A tap before a small engine."""
    routes = [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/tokenize", tokenize, methods=["POST"]),
    ]
    return PromptTap(Starlette(routes=routes))


async def post(tap: PromptTap, path: str, body: dict[str, Any]) -> httpx.Response:
    """One request through the tap."""
    transport = httpx.ASGITransport(app=tap)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        return await client.post(path, json=body)


def test_the_tap_passes_on_and_remembers(tap: PromptTap) -> None:
    """The engine gets every byte, and the tokens of the last prompt can be asked for."""
    answer = asyncio.run(post(tap, "/v1/chat/completions", BODY))
    assert answer.json()["size"] == len(answer.request.content)
    assert len(asyncio.run(tap.tokens())) == 150_000


def test_other_requests_leave_no_trace(tap: PromptTap) -> None:
    """Only chat requests are kept; without one there is no prompt to record."""
    asyncio.run(post(tap, "/tokenize", {"model": "m", "messages": [{"content": "x"}]}))
    with pytest.raises(AccountError, match="no chat request"):
        asyncio.run(tap.tokens())


def test_a_refusing_tokenizer_is_an_error(tap: PromptTap) -> None:
    """A prompt that the engine does not tokenise cannot be counted."""
    empty = {"model": "tiny", "messages": [{"role": "user", "content": ""}]}
    asyncio.run(post(tap, "/v1/chat/completions", empty))
    with pytest.raises(AccountError, match="/tokenize answers 422"):
        asyncio.run(tap.tokens())


def test_the_environment_does_not_reach_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Policies, rules and keys of the operator are not those of the replay."""
    monkeypatch.setenv("LEYLINE_POLICY", "redact")
    monkeypatch.setenv("LEYLINE_UNDECLARED", "tool=amortize")
    monkeypatch.setenv("LEYLINE_API_KEYS", "red:secret")
    monkeypatch.setenv("LEYLINE_UPSTREAM", "http://elsewhere")
    settings = StackOptions(pool_tokens=99).settings(splice=False)
    assert settings.policy is None and settings.undeclared == {}
    assert settings.api_keys == () and settings.upstream is None
    assert settings.engine_options == {"model": None, "pool_tokens": 99}
    assert not settings.splice


def test_an_engine_gets_the_pages_of_the_replay() -> None:
    """The pages that the command was given are those of the embedded engine."""
    assert StackOptions(page_tokens=64).engine_options()["page_tokens"] == 64
