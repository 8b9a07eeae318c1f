"""``POST /v1/chat/completions``: the engine's own API, down to the bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import httpx
import msgspec

from ..apis.call_arguments import readable
from ..apis.chat_history import shown_history
from ..errors import BadRequestError
from ..model.fields import OPTIONS_FIELD
from ..model.template_roles import holds_instructions
from ..request.declared import edits_by_characters
from ..request.parse import ChatRequest, decode_body, model_of, parse_chat
from ..request.wire import replace_messages
from ..tenants import Tenant
from ..turns.turn import Turn
from ..upstream.headers import RawHeaders
from ..wiring.services import Services
from .api import Api, ApiCall
from .limits import beside


class ChatCall(ApiCall):
    """One request for a chat completion."""

    path = "/v1/chat/completions"

    async def read(self, tenant: Tenant, raw: bytes) -> ChatRequest:
        """Return the body as a chat request."""
        return await beside(raw, partial(self._parsed, tenant, raw))

    def _parsed(self, tenant: Tenant, raw: bytes) -> ChatRequest:
        pool = self.services.pool
        if not pool.roles().all and holds_instructions(raw):
            raw = self._written(raw)
        bodies = self.services.bodies if self.runs else None
        parse = partial(parse_chat, clock=self.clock, bodies=bodies)
        chat = parse(raw, self.request.headers, tenant)
        # In a remembered body, all this is done.
        known = chat.read.known if chat.read is not None else 0
        shown = shown_history(chat.messages, known)
        for field, place in edits_by_characters(chat.body.get(OPTIONS_FIELD), shown):
            raise BadRequestError(
                f"{field}: message {place} holds parts of another provider, whose texts have no "
                "places of yours. Replace or drop the whole message.",
                param=field,
            )
        sent = [
            (index, message if index < known else readable(shown.get(index, message)))
            for index, message in enumerate(chat.messages)
        ]
        if all(message is chat.messages[index] for index, message in sent):
            return chat
        return parse(replace_messages(raw, sent, chat.messages), self.request.headers, tenant)

    def _written(self, raw: bytes) -> bytes:
        """Return the body with instructions in roles that the engine's template shows."""
        body = decode_body(raw)
        model_of(body)
        written = self.written(body)
        same = written is body.get("messages")
        return raw if same else msgspec.json.encode({**body, "messages": written})


CHAT = Api(ChatCall.path, "/v1/leyline/count_tokens", ChatCall)


@asynccontextmanager
async def open_chat(
    services: Services, turn: Turn, headers: RawHeaders
) -> AsyncIterator[httpx.Response]:
    """Send a turn to its engine, through the router if there is one.

    Args:
        headers: the client's, for the engine.
    """
    async with turn.replica.forward(
        "POST",
        CHAT.path,
        headers=headers,
        content=turn.body,
        own=services.routing.headers(turn),
        credentials=turn.request.tenant.forward_credentials,
        routed=True,
    ) as response:
        services.routing.note(turn, response.headers)
        yield response
