"""``HEAD`` of the proxy's own pages and probes: clients ask so if it is there at all."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

_READ = frozenset({"/", "/healthz", "/readyz", "/metrics", "/v1/models"})


class HeadRequests:
    """ASGI middleware that answers ``HEAD`` like ``GET``; the server leaves out the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one ASGI connection on."""
        path = scope["path"].removeprefix(scope.get("root_path", "")) if "path" in scope else ""
        if scope["type"] == "http" and scope["method"] == "HEAD" and path in _READ:
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)
