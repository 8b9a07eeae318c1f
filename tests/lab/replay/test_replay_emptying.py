"""The cache of a server is emptied in front of each arm, by the route that it has."""

from __future__ import annotations

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from support.http_thread import serving

from leyline_lab.engines.remote import empty_cache
from leyline_lab.errors import StackError


def engine(path: str, answer: object, asked: list[str]) -> Starlette:
    """An engine that empties its cache at ``path``, for callers with a key."""

    async def empty(request: Request) -> JSONResponse:
        asked.append(request.headers.get("authorization", ""))
        return JSONResponse(answer)

    return Starlette(routes=[Route(path, empty, methods=["POST"])])


@pytest.mark.parametrize("path", ["/flush_cache", "/reset_prefix_cache"])
def test_either_route_empties_the_cache(path: str) -> None:
    """SGLang's and vLLM's are found, and asked once with the key."""
    asked: list[str] = []
    with serving(engine(path, {"success": True}, asked)) as server:
        empty_cache(server.url, {"authorization": "Bearer key"})
    assert asked == ["Bearer key"]


def test_a_cache_that_is_held_is_told() -> None:
    """vLLM answers 200 although it did nothing."""
    with (
        serving(engine("/reset_prefix_cache", {"success": False}, [])) as server,
        pytest.raises(StackError, match="was not flushed: requests hold it"),
    ):
        empty_cache(server.url, {})


def test_without_a_route_the_fix_is_told() -> None:
    """The message names the variable that gives vLLM the route."""
    with (
        serving(Starlette()) as server,
        pytest.raises(StackError, match="VLLM_SERVER_DEV_MODE=1"),
    ):
        empty_cache(server.url, {})
