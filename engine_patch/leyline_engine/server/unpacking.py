"""Chat requests whose members a router has carried, on an engine's own HTTP application."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from leyline_engine.contract import CARRIED, unpacked
from leyline_engine.server.answering import CHAT_PATH

_NAME = CARRIED.encode()


class Unpacking:
    """ASGI middleware: carried members are in their places when the server reads a request.

    It passes requests on whole: servers read the bodies of chats whole in any case.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, as ASGI."""
        if scope["type"] != "http" or scope["path"] != CHAT_PATH:
            await self._app(scope, receive, send)
            return
        body = bytearray()
        first: list[Message] = []
        while True:
            message = await receive()
            if message["type"] != "http.request":
                first.append(message)
                break
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break
        whole = unpacked(bytes(body)) if _NAME in body else bytes(body)
        first.insert(0, {"type": "http.request", "body": whole, "more_body": bool(first)})
        scope = {**scope, "headers": _with_length(scope["headers"], len(whole))}

        async def again() -> Message:
            return first.pop(0) if first else await receive()

        await self._app(scope, again, send)


def _with_length(headers: list[tuple[bytes, bytes]], length: int) -> list[tuple[bytes, bytes]]:
    return [
        (name, b"%d" % length if name == b"content-length" else value) for name, value in headers
    ]
