"""The way to an engine: its requests' parts, and no traces of any answer."""

from __future__ import annotations

import asyncio
import base64
import socket
import struct
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from leyline_lab.stand_ins.serving import serving
from leyline_proxy.upstream.aiohttp_transport import AiohttpTransport
from leyline_proxy.upstream.link import Link


async def echo(request: Request) -> Response:
    """Return the request's parts, and a cookie."""
    body = (await request.body()).decode()
    document = {
        "method": request.method,
        "target": request.url.path + (f"?{request.url.query}" if request.url.query else ""),
        "headers": [(name.decode(), value.decode()) for name, value in request.headers.raw],
        "body": body,
    }
    return JSONResponse(document, headers={"set-cookie": "sticky=1; Path=/"})


async def away(_: Request) -> Response:
    """A redirect."""
    return Response(status_code=307, headers={"location": "/v1/echo"})


async def slow(_: Request) -> Response:
    """An answer that takes a while."""
    await asyncio.sleep(0.5)
    return Response()


@pytest.fixture(scope="module")
def origin() -> Iterator[str]:
    """A server that reports what it was sent."""
    routes = [
        Route("/v1/echo", echo, methods=["GET", "POST"]),
        Route("/below/v1/echo", echo, methods=["GET", "POST"]),
        Route("/away", away),
        Route("/slow", slow),
    ]
    with serving(Starlette(routes=routes)) as found:
        yield found


async def told(link: Link, path: str, headers: Any = (), content: bytes = b"") -> dict[str, Any]:
    """The server's report of what it was sent."""
    response = await link.send("POST", path, headers=headers, content=content)
    async with aclosing(response):
        await response.aread()
    document: dict[str, Any] = response.json()
    return document


def link_to(address: str) -> Link:
    return Link(address, AiohttpTransport(max_connections=2))


async def test_a_request_has_what_it_was_given_and_no_more(origin: str) -> None:
    """Headers stay repeated and in order; only framing and the host are added."""
    async with aclosing(link_to(origin)) as link:
        given = [(b"x-a", b"1"), (b"x-b", b"2"), (b"x-a", b"3")]
        found = await told(link, "/v1/echo?q=%2F&r", given, b"{}")
    assert (found["target"], found["body"]) == ("/v1/echo?q=%2F&r", "{}")
    own = [item for item in found["headers"] if item[0].startswith("x-")]
    assert own == [["x-a", "1"], ["x-b", "2"], ["x-a", "3"]]
    assert {name for name, _ in found["headers"]} <= {"x-a", "x-b", "host", "content-length"}


async def test_no_cookie_of_one_answer_goes_along_with_the_next_request(origin: str) -> None:
    """A server's cookie for one caller is nothing to the next."""
    async with aclosing(link_to(origin)) as link:
        await told(link, "/v1/echo")
        again = await told(link, "/v1/echo")
    assert "cookie" not in {name for name, _ in again["headers"]}


@pytest.mark.parametrize("other", [b"plain", "\u00e9".encode()])
async def test_credentials_in_an_address_go_along_and_are_not_shown(
    origin: str, other: bytes
) -> None:
    """They take the place of a key, whichever client sends the request, and the address that people
    see has none."""
    async with aclosing(link_to(origin.replace("://", "://us%40er:pass@"))) as link:
        assert link.address == origin
        given = [(b"Authorization", b"Bearer key"), (b"x-a", other)]
        found = await told(link, "/v1/echo", given)
    logins = [value for name, value in found["headers"] if name == "authorization"]
    assert [base64.b64decode(login.removeprefix("Basic ")) for login in logins] == [b"us@er:pass"]


async def test_a_request_may_have_less_time_than_others(origin: str) -> None:
    """Its own limit takes the place of the link's."""
    async with aclosing(link_to(origin)) as link:
        with pytest.raises(httpx.ReadTimeout):
            await link.send("GET", "/slow", headers=(), content=b"", timeout_s=0.05)
        response = await link.send("GET", "/slow", headers=(), content=b"")
        await response.aclose()


async def test_an_address_may_have_a_path(origin: str) -> None:
    """Requests go below it."""
    async with aclosing(link_to(f"{origin}/below/")) as link:
        assert (await told(link, "/v1/echo"))["target"] == "/below/v1/echo"


async def test_a_path_cannot_name_another_server(origin: str) -> None:
    """Only what begins with a slash is a path, and two of them are no host."""
    async with aclosing(link_to(f"{origin}/below")) as link:
        with pytest.raises(httpx.UnsupportedProtocol):
            await told(link, "http://127.0.0.1:9/v1/echo")
        with pytest.raises(httpx.UnsupportedProtocol):
            await told(link, ".evil.example/v1/echo")
    async with aclosing(link_to(origin)) as link:
        response = await link.send("GET", "//127.0.0.2/v1/echo", headers=(), content=b"")
        async with aclosing(response):
            assert response.request.url.host == "127.0.0.1"
            assert response.status_code == 404


async def test_a_redirect_is_an_answer_like_any_other(origin: str) -> None:
    """It is for the caller to follow."""
    async with aclosing(link_to(origin)) as link:
        response = await link.send("GET", "/away", headers=(), content=b"")
        async with aclosing(response):
            assert (response.status_code, response.headers["location"]) == (307, "/v1/echo")


@pytest.mark.parametrize("reset", [False, True])
async def test_an_engine_that_drops_a_request_may_have_read_it(reset: bool) -> None:
    """No error of a connection that was made is one of those before the first byte; a refused one
    is."""

    async def drop(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if reset:
            # Closing without lingering sends a reset.
            own = writer.get_extra_info("socket")
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()

    async with await asyncio.start_server(drop, "127.0.0.1") as server:
        port = server.sockets[0].getsockname()[1]
        async with aclosing(link_to(f"http://127.0.0.1:{port}")) as link:
            with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
                await link.send("POST", "/", headers=(), content=b"{}")
            server.close()
            await server.wait_closed()
            with pytest.raises(httpx.ConnectError):
                await link.send("POST", "/", headers=(), content=b"{}")
