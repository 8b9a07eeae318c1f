"""An answer of the HTTP route as frames of a WebSocket connection, and a refused connection."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import orjson
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from ..apis.responses.socket import error_frame, framed
from ..errors import ProxyError
from ..request.wire import add_members
from .errors import error_body, shaped_response
from .sse import DONE, EventSplitter, event_data

SendText = Callable[[bytes], Awaitable[None]]

_STREAM = b"text/event-stream"
_EXTENSION = "websocket.http.response"
_POLICY_VIOLATION = 1008


class FramedAnswer:
    """An ASGI ``send`` that sends events as frames, and errors as error events.

    Args:
        send: sends one frame.
        lane: lane of the request.
    """

    def __init__(self, send: SendText, lane: str | None) -> None:
        self._send = send
        self._lane = lane
        self._status = 0
        self._headers: dict[str, str] = {}
        self._streams = False
        self._splitter = EventSplitter()
        self._body = bytearray()

    async def __call__(self, message: Message) -> None:
        """Send a part of the answer."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            headers = dict(message["headers"])
            self._streams = headers.get(b"content-type", b"").startswith(_STREAM)
            self._headers = _shown(headers)
            return
        chunk = message.get("body", b"")
        if self._streams:
            await self._events(chunk)
        else:
            self._body += chunk
            if not message.get("more_body", False):
                body = bytes(self._body)
                await self._send(error_frame(self._status, body, self._headers, self._lane))

    async def _events(self, chunk: bytes) -> None:
        for event in self._splitter.feed(chunk):
            data = event_data(event)
            if data and data != DONE:  # a comment keeps an HTTP connection alive; pings do it here
                await self._send(self._in_lane(framed(data)))

    def _in_lane(self, data: bytes) -> bytes:
        if self._lane is None:
            return data
        return add_members(data, {"stream_id": orjson.dumps(self._lane)})


def failure_frame(error: ProxyError, lane: str | None = None) -> bytes:
    """Return an error as a frame."""
    headers = {name: value for name, value in error.headers.items() if name == "retry-after"}
    return error_frame(error.status, error_body(error), headers, lane)


async def refuse_socket(error: ProxyError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer the handshake of a connection with an error of the API, so that it doesn't open."""
    if _EXTENSION not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
        return
    asked = Request({**scope, "type": "http", "method": "GET"})
    await shaped_response(asked, error)(scope, receive, send)


def _shown(headers: dict[bytes, bytes]) -> dict[str, str]:
    return {
        name.decode("latin-1"): value.decode("latin-1")
        for name, value in headers.items()
        if name == b"retry-after" or name.startswith(b"x-leyline-")
    }
