"""An engine that is about to end takes no more requests.

After SIGTERM SGLang answers the requests it has begun, and ends when none is left; but it continues
to take new ones, so under load it is never empty, and is at last killed in the middle of its
streams. vLLM takes new ones only to abort them. Proxies take a 503 for "ask another engine".
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

TURNED_AWAY = ("/v1/", "/generate", "/inference/")
"""Beginnings of the refused paths. Receipts and health are answered to the end."""


class LeavingEngine:
    """ASGI middleware: 503 for new requests, once the engine is leaving.

    Args:
        leaving: called for each request.
    """

    def __init__(self, app: ASGIApp, leaving: Callable[[], bool]) -> None:
        self._app = app
        self._leaving = leaving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, as ASGI."""
        asks = scope["type"] == "http" and scope["path"].startswith(TURNED_AWAY)
        if not (asks and self._leaving()):
            await self._app(scope, receive, send)
            return
        error = {
            "message": "This engine is about to stop and takes no more requests.",
            "type": "server_error",
            "code": "engine_stopping",
        }
        answer = JSONResponse({"error": error}, 503, headers={"retry-after": "1"})
        await answer(scope, receive, send)
