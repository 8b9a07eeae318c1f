"""The proxy's own server, and a client of its WebSocket."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from starlette.types import ASGIApp
from support.fake_engine import MODEL
from websockets.asyncio.client import ClientConnection, connect
from websockets.frames import Frame, Opcode

from leyline_proxy.http.app import create_app
from leyline_proxy.http.server import ProxyServer, listening
from leyline_proxy.settings import Settings
from leyline_proxy.workers.serving import handshakes_of

LAST = ("response.completed", "response.failed", "response.incomplete", "error")
"""Types of the last event of a request."""


def is_last(event: dict[str, Any]) -> bool:
    """Return True for the last event of a request. An error within a stream is none."""
    return event["type"] in LAST and not ("error" in event and "sequence_number" in event)


class SocketProxy:
    """A proxy that runs as by ``leyline serve``."""

    def __init__(self, server: ProxyServer, address: tuple[str, int], services: Any) -> None:
        self.server = server
        self.services = services
        self.address = address
        scheme = "https" if services.tls.clients is not None else "http"
        self.origin = f"{scheme}://{address[0]}:{address[1]}"

    @asynccontextmanager
    async def socket(self, key: str | None = None, **options: Any) -> AsyncIterator[Socket]:
        """An open connection."""
        headers = {**options.pop("headers", {})}
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        url = self.origin.replace("http", "ws") + options.pop("path", "/v1/responses")
        given = {"additional_headers": headers, "max_size": None, "proxy": None, **options}
        async with connect(url, **given) as connection:
            yield Socket(connection)


class Socket:
    """One connection."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection

    async def create(self, given: Any = "Hello.", **members: Any) -> None:
        """Ask for a response."""
        body = {"type": "response.create", "model": MODEL, "input": given, **members}
        await self.connection.send(json.dumps(body))

    async def event(self) -> dict[str, Any]:
        """The next event."""
        frame = await self.connection.recv()
        assert isinstance(frame, str)
        found: dict[str, Any] = json.loads(frame)
        return found

    async def events(self) -> list[dict[str, Any]]:
        """The events up to the last of a request."""
        found = [await self.event()]
        while not is_last(found[-1]):
            found.append(await self.event())
        return found

    async def ask(self, given: Any = "Hello.", **members: Any) -> dict[str, Any]:
        """A whole response."""
        await self.create(given, **members)
        last = (await self.events())[-1]
        assert last["type"] in ("response.completed", "response.incomplete"), last
        response: dict[str, Any] = last["response"]
        return response

    async def refused(self, given: Any = "Hello.", **members: Any) -> dict[str, Any]:
        """The error event in place of a response."""
        await self.create(given, **members)
        last = await self.event()
        assert last["type"] == "error", last
        return last


@contextmanager
def socket_proxy(engine: ASGIApp, **settings: Any) -> Iterator[SocketProxy]:
    """A proxy in front of an engine, in a thread."""
    given = Settings(**{"handshake_retry_s": 0.05, "shutdown_grace_s": 5, **settings})
    app = create_app(given, engine_app=engine)
    listener = socket.create_server(("127.0.0.1", 0))
    services = app.state.services
    server = ProxyServer(
        app,
        given,
        services.shutdown,
        door=listening(listener),
        handshakes=handshakes_of(services),
    )
    thread = threading.Thread(target=server.run, args=([],))
    thread.start()
    try:
        deadline = time.monotonic() + 60
        while not server.started:
            assert thread.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield SocketProxy(server, listener.getsockname(), services)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
        listener.close()


def begun(text: str, size: int | None = None) -> bytes:
    """The first ``size`` bytes of a message in one frame; all of them without a size."""
    return Frame(Opcode.TEXT, text.encode()).serialize(mask=True)[:size]


def framed_parts(*parts: str, first: bool = True, fin: bool = False) -> bytes:
    """Parts of a message, each in a frame.

    Args:
        first: the message begins with them.
        fin: it ends with them.
    """
    frames = []
    for number, part in enumerate(parts):
        kind = Opcode.TEXT if first and not number else Opcode.CONT
        last = fin and number == len(parts) - 1
        frames.append(Frame(kind, part.encode(), fin=last).serialize(mask=True))
    return b"".join(frames)


async def until(done: Callable[[], bool], seconds: float = 30) -> None:
    """Wait for something that another thread does."""
    async with asyncio.timeout(seconds):
        while not done():  # noqa: ASYNC110 - the other thread has no event for it
            await asyncio.sleep(0.01)
