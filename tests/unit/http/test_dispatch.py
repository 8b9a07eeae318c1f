"""The short way to the turns' paths: it answers as the framework's routing does."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from support.fake_engine import MODEL, FakeEngine

from leyline_proxy.http.app import create_app
from leyline_proxy.http.routes import APIS
from leyline_proxy.settings import Settings
from leyline_proxy.upstream.embedded import ASGIStreamTransport, lifespan_of

BODIES: dict[str, Any] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi."}]},
    "/v1/responses": {"input": "Hi."},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 4},
}


def shape(document: Any) -> Any:
    """A document's members and their types, whatever the values."""
    if isinstance(document, dict):
        return {name: shape(value) for name, value in sorted(document.items())}
    return type(document).__name__


@pytest.mark.parametrize("path", APIS)
async def test_both_ways_to_a_turn_answer_alike(path: str) -> None:
    """Mounted in another application, where paths have a prefix and routing finds them, turns and
    errors are as they are at the root."""
    app = create_app(Settings(api_keys=["team:key-1234567890"]), engine_app=FakeEngine())
    host = Starlette(routes=[Mount("/below", app)])
    good = {"authorization": "Bearer key-1234567890"}
    asked = {"model": MODEL, **BODIES[path]}
    got = []
    async with lifespan_of(app):
        for served, prefix in ((app, ""), (host, "/below")):
            transport = ASGIStreamTransport(served)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
                answers = [
                    await http.post(prefix + path, json=asked, headers=good),
                    await http.post(prefix + path, json=asked),
                    await http.post(prefix + path, content=b"{", headers=good),
                ]
            got.append([(answer.status_code, shape(answer.json())) for answer in answers])
    assert [status for status, _ in got[0]] == [200, 401, 400]
    assert got[0] == got[1]


async def test_the_short_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn passes the framework's routing by; all other methods and paths go through it."""
    app = create_app(Settings(), engine_app=FakeEngine())
    routed: list[tuple[str, str]] = []
    routing = app.router.app

    async def noted(scope: Any, receive: Any, send: Any) -> None:
        routed.append((scope["method"], scope["path"]))
        await routing(scope, receive, send)

    monkeypatch.setattr(app.router, "middleware_stack", noted)
    transport = ASGIStreamTransport(app)
    async with (
        lifespan_of(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as http,
    ):
        routed.clear()
        for path, body in BODIES.items():
            answer = await http.post(path, json={"model": MODEL, **body})
            assert answer.status_code == 200
        assert routed == []
        for method in ("GET", "HEAD", "OPTIONS", "PUT"):
            assert (await http.request(method, "/v1/chat/completions")).status_code in (
                403,
                404,
                405,
            )
        assert (await http.post("/v1/chat/completions/", json={})).status_code == 404
    assert len(routed) == 5
