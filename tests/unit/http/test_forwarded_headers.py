"""Headers of a client that go upstream, by route, and lists of models behind another proxy."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import openai
import pytest
from starlette.types import Receive, Scope, Send
from support.fake_engine import JSON, MODEL, Answer, FakeEngine, chat_json, proxy_before

from leyline_lab.stand_ins.serving import serving
from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings
from leyline_proxy.upstream.headers import MODELS, NATIVE, OTHER, TAKEN

TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi."}]}
BODIES: dict[str, dict[str, Any] | None] = {
    "/v1/chat/completions": TALK,
    "/v1/completions": {"prompt": "Hi."},
    "/v1/messages": {**TALK, "max_tokens": 9},
    "/v1/responses": {"input": "Hi.", "store": False},
    "/v1/responses/compact": {"input": "Hi."},
    "/v1/embeddings": {"input": "Hi."},
    MODELS: None,
    f"{MODELS}/{MODEL}": None,
}
ROUTES = {
    **{path: path for path in BODIES if path in TAKEN},
    "/v1/responses/compact": "/v1/responses",
    "/v1/embeddings": OTHER,
    f"{MODELS}/{MODEL}": MODELS,
}
"""Rows of the table, by the path that a client asks for."""
ANTHROPICS = {"anthropic-version": "2023-06-01", "anthropic-beta": "b", "anthropic-any": "a"}
OPENAIS = {"openai-organization": "o", "chatgpt-account-id": "c", "x-codex-turn": "x"}
ALWAYS = {"x-client": "1", "user-agent": "u", "accept": "*/*"}
NEVER = {
    "authorization": "Bearer client",
    "x-api-key": "client",
    "cookie": "c=1",
    "forwarded": "for=1",
    "x-forwarded-for": "1",
    "x-leyline-session": "s",
    "x-override-a": "1",
    "x-data-parallel-rank": "1",
    "connection": "x-hop",
    "x-hop": "1",
    "te": "trailers",
}
EXPECTED = {
    "/v1/chat/completions": OPENAIS,
    "/v1/completions": OPENAIS,
    "/v1/messages": {},
    "/v1/responses": {},
    MODELS: {},
    OTHER: {**ANTHROPICS, **OPENAIS},
    f"{NATIVE}/v1/messages": ANTHROPICS,
    f"{NATIVE}/v1/responses": OPENAIS,
}


class Noting(FakeEngine):
    """Answers everything, and notes the headers of what bears the client's mark."""

    def __init__(self) -> None:
        super().__init__()
        self.came: list[dict[str, str]] = []
        entry = {"id": MODEL, "object": "model", "max_model_len": 4096}
        self.scripted = {
            f"{MODELS}/": Answer([json.dumps(entry).encode()]),
            MODELS: Answer([json.dumps({"object": "list", "data": [entry]}).encode()]),
            **{path: chat_json() for path in ("/v1/embeddings", "/v1/messages", "/v1/responses")},
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        if "x-client" in headers:
            self.came.append(headers)
        await super().__call__(scope, receive, send)


@pytest.mark.parametrize("asked", [*ROUTES, f"{NATIVE}/v1/messages", f"{NATIVE}/v1/responses"])
async def test_the_headers_of_each_route(asked: str) -> None:
    """A provider's go only where its servers may be; credentials and this hop's, nowhere."""
    engine = Noting()
    path = asked.removeprefix(NATIVE)
    given = {**ALWAYS, **NEVER, **ANTHROPICS, **OPENAIS}
    body = BODIES[path]
    with serving(engine) as origin:
        apis = ["messages", "responses"] if asked.startswith(NATIVE) else []
        upstreams = {"e": {"url": origin, "apis": apis}}
        engine.capability = None if apis else engine.capability
        app = create_app(Settings(upstreams=upstreams, api_keys=["t:client"], log_level="error"))
        with serving(app) as address:
            async with httpx.AsyncClient(base_url=address, headers=JSON) as http:
                if body is None:
                    await http.get(path, headers=given)
                else:
                    await http.post(path, json={"model": MODEL, **body}, headers=given)
    assert engine.came, "the engine was asked"
    for came in engine.came:
        found = {name: came[name] for name in {*given} & {*came} - {"connection"}}
        assert found == {**ALWAYS, **EXPECTED[ROUTES.get(asked, asked)]}


def test_every_row_is_tried() -> None:
    """A route that is added to the table is added here."""
    assert TAKEN.keys() == EXPECTED.keys()


@pytest.mark.parametrize("engines", [1, 2])
async def test_windows_are_known_behind_another_proxy(engines: int) -> None:
    """Each SDK gets the list and the entry in its own shape, with the window, however many proxies
    are in between."""
    inner = [create_app(Settings(log_level="error"), engine_app=Noting()) for _ in range(engines)]
    with serving(inner[0]) as one, serving(inner[-1]) as other:
        upstreams = {"a": one} if engines == 1 else {"a": one, "b": other}
        outer = create_app(Settings(upstreams=upstreams, log_level="error"))
        with serving(outer) as origin:
            a = anthropic.Anthropic(base_url=origin, api_key="k", max_retries=0)
            o = openai.OpenAI(base_url=f"{origin}/v1", api_key="k", max_retries=0)
            (listed,) = a.models.list().data
            entry = a.models.retrieve(MODEL)
            (plain,) = o.models.list().data
            same = o.models.retrieve(MODEL)
    for found in (listed, entry):
        assert (found.type, found.id, found.max_input_tokens) == ("model", MODEL, 4096)
    for each in (plain, same):
        assert (each.object, each.model_extra["max_model_len"]) == ("model", 4096)  # type: ignore[index]


async def test_an_entry_that_is_none_is_the_engines_fault() -> None:
    """The entry of a model that no list has can't be put in Anthropic's shape without an id."""
    engine = FakeEngine()
    engine.scripted = {f"{MODELS}/": Answer([b"[]"])}
    async with proxy_before(engine) as http:
        answer = await http.get(f"{MODELS}/unlisted", headers=ANTHROPICS)
    assert (answer.status_code, answer.json()["type"]) == (502, "error")
