"""Half a surrogate pair in a body: every route reads U+FFFD, and engines get what was planned."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send
from support.fake_engine import JSON, MODEL, FakeEngine, proxy_before
from support.responses_route import scripted
from support.sockets import socket_proxy
from support.stack import embedded_stack

HALF = "cut \ud83d here"
WHOLE = "cut \ufffd here"
TALK = [{"role": "user", "content": HALF}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TALK},
    "/v1/messages": {"messages": TALK, "max_tokens": 4},
    "/v1/responses": {"input": HALF},
    "/v1/completions": {"prompt": HALF},
    "/v1/embeddings": {"input": HALF},
}


class Upstream(FakeEngine):
    """An engine that also makes embeddings."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        known = {**scope, "path": scope["path"].replace("embeddings", "completions")}
        await super().__call__(known, receive, send)


@pytest.mark.parametrize("path", ROUTES)
async def test_every_route_takes_it(path: str) -> None:
    """Texts, names of members and the model's own members reach the engine without halves."""
    engine = Upstream()
    sent = json.dumps({"model": MODEL, **ROUTES[path], "x\udc00": {"y": "\\ud83d \ud83d\ude00"}})
    async with proxy_before(engine) as client:
        answer = await client.post(path, content=sent, headers=JSON)
    assert answer.status_code == 200, answer.text
    got = json.loads(engine.bodies[-1])
    shown = got["messages"][-1]["content"] if "messages" in got else None
    assert WHOLE in (shown, got.get("prompt"), got.get("input"))
    assert got["x\ufffd"] == {"y": "\\ud83d \U0001f600"}


async def test_a_frame_is_a_body(engine: FakeEngine) -> None:
    """Over WebSocket, too."""
    engine.answers = [scripted()]
    with socket_proxy(engine) as proxy:
        async with proxy.socket() as ws:
            await ws.ask(HALF)
    assert json.loads(engine.bodies[-1])["messages"][-1]["content"] == WHOLE


def test_what_is_planned_is_what_the_engine_gets() -> None:
    """Sessions with halves splice, and the tokens of an edit are those of the repaired text."""
    listing = "".join(f"{n:04d} build/module_{n} \ud83d\n" for n in range(40))
    call = {"id": "c\udc00", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
    talk: list[dict[str, Any]] = [
        {"role": "user", "content": HALF},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c\udc00", "content": listing},
    ]
    options = {"pool_tokens": 32_768, "device": "cpu"}
    with embedded_stack(options, log_level="error") as origin:
        first = turn(origin, talk)
        talk += [first["choices"][0]["message"], {"role": "user", "content": HALF}]
        edit = {"message": 2, "chars": [20, 300], "replacement": "\ud83d", "mode": "amortize"}
        second = turn(origin, talk, leyline={"edits": [edit]})
    assert second["leyline"]["outcome"] == "spliced"
    assert second["leyline"]["tokens"]["spliced"] > 0


def turn(origin: str, talk: list[dict[str, Any]], **members: Any) -> dict[str, Any]:
    """One turn, in JSON as Python writes it."""
    asked = {"model": "leyline-recall", "messages": talk, "max_tokens": 4, **members}
    url, sent = f"{origin}/v1/chat/completions", json.dumps(asked)
    answer = httpx.post(url, content=sent, headers=JSON, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found
