"""A real engine, of which one document is another's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send


class Altered:
    """Passes requests on to ``app``, whose own start and stop are the caller's business.

    Args:
        path: of the document that is changed on its way.
        change: makes another of it.
    """

    def __init__(
        self,
        app: ASGIApp,
        path: str = "",
        change: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    ) -> None:
        self._app = app
        self._path = path
        self._change = change

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "lifespan":
            while (message := await receive())["type"] != "lifespan.shutdown":
                await send({"type": f"{message['type']}.complete"})
            await send({"type": "lifespan.shutdown.complete"})
        elif scope["path"] != self._path:
            await self._app(scope, receive, send)
        else:
            transport = httpx.ASGITransport(self._app)
            async with httpx.AsyncClient(transport=transport, base_url="http://engine") as http:
                headers = Request(scope).headers.items()
                answer = await http.get(self._path, headers=dict(headers))
            await JSONResponse(self._change(answer.json()))(scope, receive, send)
