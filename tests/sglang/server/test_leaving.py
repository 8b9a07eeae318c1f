"""An engine that is about to end, and the requests that still come."""

from __future__ import annotations

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from leyline_engine.server.leaving import LeavingEngine

PATHS = ("/v1/chat/completions", "/v1/models", "/generate", "/health", "/leyline/receipts/m")


async def served(_: Request) -> PlainTextResponse:
    return PlainTextResponse("served")


@pytest.mark.parametrize(
    ("leaving", "refused"), [(False, ()), (True, PATHS[:3])], ids=["stays", "leaves"]
)
async def test_new_requests_are_turned_away_while_the_engine_leaves(
    leaving: bool, refused: tuple[str, ...]
) -> None:
    """All that asks for tokens gets a 503 in the API's shape; receipts and health are answered."""
    app = Starlette(routes=[Route(path, served) for path in PATHS])
    app.add_middleware(LeavingEngine, leaving=lambda: leaving)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        answers = {path: await client.get(path) for path in PATHS}
    assert {path for path, answer in answers.items() if answer.status_code == 503} == {*refused}
    for path in refused:
        assert answers[path].json()["error"]["code"] == "engine_stopping"
        assert answers[path].headers["retry-after"] == "1"
