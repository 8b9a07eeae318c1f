"""``POST /v1/chat/completions``: the engine's own API, down to the bytes."""

from __future__ import annotations

from functools import partial

from ..request.parse import ChatRequest, parse_chat
from ..tenants import Tenant
from .api import Api, ApiCall
from .limits import beside


class ChatCall(ApiCall):
    """One request for a chat completion."""

    path = "/v1/chat/completions"

    async def read(self, tenant: Tenant, raw: bytes) -> ChatRequest:
        """Return the body as a chat request."""
        bodies = self.services.bodies if self.runs else None
        headers = self.request.headers
        parsed = partial(parse_chat, raw, headers, tenant, clock=self.clock, bodies=bodies)
        return await beside(raw, parsed)


CHAT = Api(ChatCall.path, "/v1/leyline/count_tokens", ChatCall)
