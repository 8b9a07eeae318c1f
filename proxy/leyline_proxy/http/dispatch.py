"""Dispatch to the turns' paths without the framework's routing, which costs as much as a diff."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from ..wiring.services import Services
from .api import Api
from .response_socket import ResponseSockets
from .turn import TurnExchange


class TurnDispatch:
    """ASGI middleware that sends a POST to an API's path for turns straight to its exchange, and
    takes all WebSocket connections.

    The routes of these paths stay, for the API's description and for other methods. An exchange
    answers every error itself, so that it bypasses none of the framework's handlers.

    Args:
        apis: APIs by path.
    """

    def __init__(self, app: ASGIApp, services: Services, apis: Mapping[str, Api]) -> None:
        self._app = app
        self._services = services
        self._apis = apis
        self._sockets = ResponseSockets(services)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Dispatch one ASGI connection."""
        if scope["type"] == "http" and scope["method"] == "POST":
            api = self._apis.get(scope["path"])
            if api is not None:
                request = Request(scope, receive, send)
                await TurnExchange(self._services, request, api)(scope, receive, send)
                return
        elif scope["type"] == "websocket":
            await self._sockets(scope, receive, send)
            return
        await self._app(scope, receive, send)
