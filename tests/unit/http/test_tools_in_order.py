"""The session's first order of tools over HTTP: at several proxies, in front of other APIs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.fake_engine import MODEL, FakeEngine, proxy_before
from support.redis_server import redis_server
from test_native_apis import MESSAGES, Upstream, before

from leyline_lab.stand_ins.serving import serving
from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings

CHAT = "/v1/chat/completions"
NAMED = {"x-leyline-session": "tools"}


def functions(names: str) -> list[dict[str, Any]]:
    """Tools of the chat API."""
    return [{"type": "function", "function": {"name": name}} for name in names]


def talk(turn: int) -> list[dict[str, Any]]:
    """A conversation of so many answers."""
    said = [{"role": "user", "content": "Hi."}]
    for _ in range(turn):
        said += [{"role": "assistant", "content": "Hello."}, {"role": "user", "content": "On."}]
    return said


def sent(engine: FakeEngine, member: str = "tools") -> str:
    """The names that the engine got last."""
    return "".join((each.get("function") or each)["name"] for each in engine.sent[member])


@pytest.mark.parametrize("member", ["tools", "functions"])
async def test_the_order_is_the_operators_choice(engine: FakeEngine, member: str) -> None:
    """By default tools go out as they came; with ``first``, in the session's order, named in the
    account; a tenant or a request may choose otherwise."""
    tools = functions("cab") if member == "tools" else [{"name": name} for name in "cab"]
    for settings, more, expected in (
        ({}, {}, "cab"),
        ({"tool_order": "first"}, {}, "abc"),
        ({"tool_order": "first"}, {"leyline": {"tool_order": "sent"}}, "cab"),
        ({"tool_order": "first", "tenants": {"default": {"tool_order": "sent"}}}, {}, "cab"),
    ):
        async with proxy_before(engine, **settings) as client:
            for turn, given in enumerate((sorted(tools, key=str), tools)):
                body = {"model": MODEL, "messages": talk(turn), member: given, **more}
                answer = await client.post(CHAT, json=body, headers=NAMED)
        assert sent(engine, member) == expected
        assert answer.json()["leyline"].get("tools_moved") == (3 if expected == "abc" else None)


async def test_an_unknown_order_is_refused(engine: FakeEngine) -> None:
    """The error names the field."""
    async with proxy_before(engine) as client:
        body = {"model": MODEL, "messages": talk(0), "leyline": {"tool_order": "sorted"}}
        answer = await client.post(CHAT, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "leyline.tool_order"


def test_another_proxy_keeps_the_order(tmp_path: Path) -> None:
    """Proxies that share sessions in Redis share the order of their tools."""
    engine = FakeEngine()
    with redis_server(tmp_path) as server, serving(engine) as origin:
        for turn, names in enumerate(("abc", "dcab", "bdca")):
            app = create_app(
                Settings(
                    upstream=origin,
                    session_store=server.url,
                    session_secret=["a secret of sixteen characters or more"],
                    log_level="error",
                    tool_order="first",
                )
            )
            body = {"model": MODEL, "messages": talk(turn), "tools": functions(names)}
            with serving(app) as address:
                httpx.post(f"{address}{CHAT}", json=body, headers=NAMED).raise_for_status()
        assert sent(engine) == "abcd"


def test_an_upstream_of_the_clients_own_api_gets_them_in_order() -> None:
    """A request that isn't translated has its tools in the same order, with its other bytes."""
    upstream = Upstream()
    with before(upstream, tool_order="first") as client:
        for turn, names in enumerate(("abc", "cab")):
            tools = [{"name": name, "input_schema": {"type": "object"}} for name in names]
            body = {"model": MODEL, "max_tokens": 5, "messages": talk(turn), "tools": tools}
            answer = client.post(MESSAGES, json=body, headers=NAMED)
            assert answer.status_code == 200, answer.text
    (_, first, _), (path, second, _) = upstream.taken
    assert path == MESSAGES
    assert json.loads(second)["tools"] == json.loads(first)["tools"]
    assert answer.json()["leyline"]["tools_moved"] == 3
