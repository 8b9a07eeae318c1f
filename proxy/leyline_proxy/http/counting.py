"""``POST /v1/leyline/count_tokens``: a chat request's prompt tokens."""

from __future__ import annotations

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..request.parse import parse_chat
from ..tenants import Tenant
from .exchange import Exchange
from .limits import until_disconnect

COUNT_PATH = "/v1/leyline/count_tokens"


class CountExchange(Exchange):
    """Prompt tokens of a chat request that isn't run. To count costs the proxy what answering
    does, so the tenant's limits hold here, too."""

    route = COUNT_PATH

    async def serve(
        self, tenant: Tenant, raw: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Count."""
        chat = parse_chat(raw, self.request.headers, tenant, arrived=self.arrived)
        self.model = self.services.pool.label(chat.model)
        counted = await until_disconnect(receive, self.services.turns.count_prompt(chat))
        response = Response(orjson.dumps(counted), media_type="application/json")
        await self.answer(response, scope, receive, send)
