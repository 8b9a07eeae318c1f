"""An engine elsewhere, read as if it were in this process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from leyline_lab.engines.remote import Forwarder
from leyline_proxy.upstream.embedded import ASGIStreamTransport, lifespan_of


async def _echo(request: Request) -> Response:
    body = (await request.body()).decode()
    told = {"query": request.url.query, "body": body, "mark": request.headers.get("x-mark")}
    return JSONResponse(told, 418, headers={"x-mark": "back"})


async def _stream(_: Request) -> Response:
    async def parts() -> object:
        for part in (b"data: 1\n\n", b"data: 2\n\n"):
            yield part

    return StreamingResponse(parts(), media_type="text/event-stream")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A server on loopback."""
    app = Starlette(routes=[Route("/echo", _echo, methods=["POST"]), Route("/stream", _stream)])
    server = uvicorn.Server(uvicorn.Config(app, log_config=None))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join(10)


async def test_requests_and_answers_pass_whole(address: str) -> None:
    """Method, query, headers and body go there; status, headers and body come back."""
    app = Forwarder(address)
    async with (
        lifespan_of(app),
        httpx.AsyncClient(transport=ASGIStreamTransport(app), base_url="http://engine") as client,
    ):
        answer = await client.post("/echo?a=1&b=%20", content=b"{}", headers={"x-mark": "there"})
    assert answer.status_code == 418
    assert answer.headers["x-mark"] == "back"
    assert answer.json() == {"query": "a=1&b=%20", "body": "{}", "mark": "there"}


async def test_streams_pass(address: str) -> None:
    """An event stream comes back with its type and all of its events."""
    app = Forwarder(address)
    async with (
        lifespan_of(app),
        httpx.AsyncClient(transport=ASGIStreamTransport(app), base_url="http://engine") as client,
        client.stream("GET", "/stream") as answer,
    ):
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in answer.aiter_lines() if line]
    assert lines == ["data: 1", "data: 2"]
