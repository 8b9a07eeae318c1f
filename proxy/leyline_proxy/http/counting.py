"""Counts of the prompt tokens of a request that isn't run, in any API."""

from __future__ import annotations

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..errors import ProxyError
from ..tenants import Tenant
from ..upstream.tokens import TokensRefusedError
from ..wiring.services import Services
from .api import Api, read_call
from .exchange import Exchange
from .limits import until_disconnect


class CountExchange(Exchange):
    """Counts a request's prompt tokens. Counting costs the proxy as much as answering, so the
    tenant's limits apply.

    Args:
        api: the client's API.
    """

    def __init__(self, services: Services, request: Request, api: Api) -> None:
        super().__init__(services, request, api.count_path)
        self._call = api.call(services, request, self.clock, runs=False)
        self.extra_headers.update(self._call.headers)

    async def serve(
        self, tenant: Tenant, raw: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Count the tokens, and answer with the count."""
        chat = await read_call(self._call, tenant, raw, receive)
        self.model = self.services.pool.label(chat.model)
        response: Response
        try:
            tokens = await until_disconnect(receive, self.services.turns.count_prompt(chat))
        except TokensRefusedError as refused:
            response = self._call.refused(refused.answer, refused.body, self.extra_headers)
        else:
            body = orjson.dumps(self._call.counted(tokens))
            response = Response(body, headers=self.extra_headers, media_type="application/json")
        await self.answer(response, scope, receive, send)

    def failure(self, error: ProxyError) -> Response:
        """Return ``error`` in the shape of the client's API."""
        return self._call.error(error, self.extra_headers)
