"""``POST /v1/responses/compact``: the compaction of a conversation, without an answer to it."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..apis.responses.answer import usage_of
from ..apis.responses.stored import users
from ..errors import ProxyError
from ..model.fields import OPTIONS_FIELD
from ..request.compaction import forced
from ..tenants import Tenant
from ..turns.accounting import account_headers
from ..wiring.services import Services
from .api import read_call
from .compacting import Compacting
from .exchange import Exchange
from .responses import RESPONSES, ResponsesCall

COMPACT_PATH = f"{RESPONSES.path}/compact"


class CompactExchange(Exchange):
    """Compacts a conversation. The answer is nothing but the summary's turn, so its errors are the
    client's."""

    spends = True

    def __init__(self, services: Services, request: Request) -> None:
        super().__init__(services, request, COMPACT_PATH)
        self._call = ResponsesCall(services, request, self.clock, runs=False)

    async def serve(
        self, tenant: Tenant, raw: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Ask the model for the summary, and answer with the user's messages and the summary."""
        chat = await read_call(self._call, tenant, raw, receive)
        self.model = self.services.pool.label(chat.model)
        wish = forced(chat.compaction)
        written = await Compacting(self.services, self._call).write(chat, wish, receive)
        self.message_id = written.turn.message_id
        self.extra_headers["x-leyline-session"] = written.turn.identity.session_id
        output = users(self._call.items)
        output.append(self._call.compaction_item(chat, written.report, len(output)))
        members = written.account.members
        members[OPTIONS_FIELD]["compaction"] = written.report.document()
        document: dict[str, Any] = {
            "id": self._call.identifier,
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": output,
            "usage": usage_of(written.report.usage or {}),
            **members,
        }
        response = Response(
            msgspec.json.encode(document),
            headers={**self.extra_headers, **account_headers(written.account.receipt)},
            media_type="application/json",
        )
        await self.answer(response, scope, receive, send)

    def failure(self, error: ProxyError) -> Response:
        """Return ``error`` in the shape of the API."""
        return self._call.error(error, self.extra_headers)
