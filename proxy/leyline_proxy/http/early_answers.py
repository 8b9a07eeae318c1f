"""Answers given before the request's body is read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_READ_S = 2.0
_READ_BYTES = 64 * 1024 * 1024
"""Bytes of a body that are still read after the answer."""

_BODY = frozenset({b"content-length", b"transfer-encoding"})


class EarlyAnswers:
    """ASGI middleware that lets clients read an answer given while their body is still on the way.

    A server that closes a connection with bytes unread resets it, and the reset overtakes the
    answer, its body first. So this middleware reads and discards the rest of the request, for a
    while, before it reports the answer as complete to the server. The answer's headers announce
    that the server then closes the connection.

    An application that has begun to answer reads no more of the body.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application; read the rest of the body if it answers early."""
        if scope["type"] != "http" or not _has_body(scope):
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send)
        await self._app(scope, exchange.receive, exchange.send)
        await exchange.end()


class _Exchange:
    """One request with a body, and its answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._read = False
        """True once the body is at its end or the client has gone."""
        self._held = False
        """True once the answer has been sent except for its end."""

    async def receive(self) -> Message:
        """Return a part of the body."""
        message = await self._receive()
        self._read = self._read or not message.get("more_body", False)
        return message

    def send(self, message: Message) -> Awaitable[None]:
        """Send a part of the answer."""
        return self._send(message) if self._read else self._early(message)

    async def end(self) -> None:
        """Read the rest of the body, then end the answer."""
        if self._held:
            with suppress(TimeoutError):
                async with asyncio.timeout(_READ_S):
                    await self._read_on()
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _early(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self._look()
            if not self._read and self._scope["http_version"].startswith("1."):
                message = {**message, "headers": _closing(message.get("headers", ()))}
        elif not message.get("more_body", False):
            self._held = not self._read
            message = {**message, "more_body": self._held}
        await self._send(message)

    async def _look(self) -> None:
        """Read the bytes that have arrived: a complete body is no reason to close."""
        if not any(name == b"expect" for name, _ in self._scope["headers"]):  # it would be sent
            with suppress(TimeoutError):
                async with asyncio.timeout(0):
                    await self._read_on()

    async def _read_on(self) -> None:
        left = _READ_BYTES
        while not self._read and left > 0:
            left -= len((await self.receive()).get("body", b""))


def _has_body(scope: Scope) -> bool:
    return any(name in _BODY and value != b"0" for name, value in scope["headers"])


def _closing(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    kept = [item for item in headers if item[0].lower() != b"connection"]
    return [*kept, (b"connection", b"close")]
