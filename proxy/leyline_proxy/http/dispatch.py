"""The way to the turns' paths without the framework's routing, which costs as much as a diff."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from ..wiring.services import Services
from .exchange import Exchange


class ExchangeDispatch:
    """ASGI middleware: a POST to an exchange's own path goes straight there.

    The routes of these paths stay, for the API's description and for other methods. An exchange
    answers every error itself, so that none of the framework's handlers is passed by.

    Args:
        exchanges: by path.
    """

    def __init__(
        self, app: ASGIApp, services: Services, exchanges: Mapping[str, type[Exchange]]
    ) -> None:
        self._app = app
        self._services = services
        self._exchanges = exchanges

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "http" and scope["method"] == "POST":
            exchange = self._exchanges.get(scope["path"])
            if exchange is not None:
                request = Request(scope, receive, send)
                await exchange(self._services, request)(scope, receive, send)
                return
        await self._app(scope, receive, send)
