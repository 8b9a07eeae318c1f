"""The in-process transport: streaming, back pressure, disconnects and failures."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from leyline_proxy.upstream.embedded import ASGIStreamTransport, lifespan_of

App = Callable[[Scope, Receive, Send], Awaitable[None]]
START: Message = {"type": "http.response.start", "status": 200, "headers": []}


def client(app: App, **options: Any) -> httpx.AsyncClient:
    """A client of ``app``."""
    return httpx.AsyncClient(
        transport=ASGIStreamTransport(app), base_url="http://engine.embedded", **options
    )


def body(content: bytes, *, more: bool = True) -> Message:
    """A body message."""
    return {"type": "http.response.body", "body": content, "more_body": more}


async def test_chunks_arrive_before_the_application_ends() -> None:
    """A chunk is readable while the application still waits to send the next one."""
    go_on = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        await send(body(b"one"))
        await go_on.wait()
        await send(body(b"two", more=False))

    async with client(app) as http, http.stream("GET", "/") as response:
        chunks = response.aiter_raw()
        assert await anext(chunks) == b"one"
        go_on.set()
        assert await anext(chunks) == b"two"
        assert [chunk async for chunk in chunks] == []


async def test_the_request_reaches_the_application_whole() -> None:
    """Method, path, query, headers and body are those of the request."""
    seen: dict[str, Any] = {}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.update(scope, body=(await receive())["body"])
        await send({"type": "http.response.start", "status": 418, "headers": [(b"x-a", b"b")]})
        await send(body(b"", more=False))

    async with client(app) as http:
        response = await http.post("/a/b?c=d", content=b"payload", headers={"X-Name": "value"})
    assert (response.status_code, response.headers["x-a"]) == (418, "b")
    assert (seen["method"], seen["path"], seen["query_string"]) == ("POST", "/a/b", b"c=d")
    assert (b"x-name", b"value") in seen["headers"]
    assert seen["body"] == b"payload"


async def test_closing_the_response_tells_the_application() -> None:
    """A client that leaves mid-stream is an http.disconnect for the application."""
    told = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send(START)
        await send(body(b"one"))
        assert (await receive())["type"] == "http.disconnect"
        told.set()

    async with client(app) as http:
        async with http.stream("POST", "/") as response:
            assert await anext(response.aiter_raw()) == b"one"
        assert told.is_set()


async def test_a_cancelled_request_tells_the_application() -> None:
    """Giving up before the status line is an http.disconnect as well."""
    told, entered = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        entered.set()
        assert (await receive())["type"] == "http.disconnect"
        told.set()

    async with client(app) as http:
        request = asyncio.create_task(http.post("/"))
        await entered.wait()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert told.is_set()


async def test_an_unread_response_holds_the_application_back() -> None:
    """A reader that doesn't read bounds what the application can have sent."""
    sent = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal sent
        await send(START)
        for _ in range(1000):
            await send(body(b"x"))
            sent += 1

    async with client(app) as http, http.stream("GET", "/"):
        await asyncio.sleep(0.05)
        assert 0 < sent < 100


async def test_failures_are_protocol_errors() -> None:
    """An application that fails, or ends early, is a broken server and not a crash."""

    async def raises(scope: Scope, receive: Receive, send: Send) -> None:
        raise ValueError("secret prompt")

    async def silent(scope: Scope, receive: Receive, send: Send) -> None:
        return

    async def half(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        await send(body(b"half"))

    for app in (raises, silent, half):
        async with client(app) as http:
            with pytest.raises(httpx.RemoteProtocolError) as caught:
                await http.get("/")
            assert "secret" not in str(caught.value)


async def test_a_silent_application_times_out() -> None:
    """The read timeout bounds the wait for the response."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await receive()

    async with client(app, timeout=0.05) as http:
        with pytest.raises(httpx.ReadTimeout):
            await http.get("/")


async def test_lifespan_starts_and_stops_the_application() -> None:
    """The application's start-up runs before the body of the context, its shutdown after it."""
    order: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for stage in ("startup", "shutdown"):
            assert (await receive())["type"] == f"lifespan.{stage}"
            order.append(stage)
            await send({"type": f"lifespan.{stage}.complete"})

    async with lifespan_of(app):
        order.append("body")
    assert order == ["startup", "body", "shutdown"]


async def test_an_application_without_lifespan_is_left_alone() -> None:
    """An unknown lifespan protocol is no failure."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError(scope["type"])

    async with lifespan_of(app):
        pass


async def test_a_failed_start_is_told() -> None:
    """An engine that can't start stops the proxy's start with its own words."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.failed", "message": "no memory"})

    with pytest.raises(RuntimeError, match="no memory"):
        async with lifespan_of(app):
            pass
