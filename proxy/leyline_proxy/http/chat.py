"""``POST /v1/chat/completions``: the engine's own API, down to the bytes."""

from __future__ import annotations

from functools import partial

from ..apis.chat_history import shown_history
from ..errors import BadRequestError
from ..model.fields import OPTIONS_FIELD
from ..request.parse import ChatRequest, parse_chat
from ..request.wire import replace_messages
from ..tenants import Tenant
from .api import Api, ApiCall
from .limits import beside


class ChatCall(ApiCall):
    """One request for a chat completion."""

    path = "/v1/chat/completions"

    async def read(self, tenant: Tenant, raw: bytes) -> ChatRequest:
        """Return the body as a chat request."""
        return await beside(raw, partial(self._parsed, tenant, raw))

    def _parsed(self, tenant: Tenant, raw: bytes) -> ChatRequest:
        bodies = self.services.bodies if self.runs else None
        headers = self.request.headers
        chat = parse_chat(raw, headers, tenant, clock=self.clock, bodies=bodies)
        # A remembered body holds no parts of other providers: they have been replaced in it.
        shown = shown_history(chat.messages, chat.read.known if chat.read is not None else 0)
        if not shown:
            return chat
        for number, edit in enumerate(chat.options.edits):
            if edit.chars is not None and edit.message in shown:
                field = f"{OPTIONS_FIELD}.edits[{number}].chars"
                raise BadRequestError(
                    f"{field}: message {edit.message} holds parts of another provider, whose texts "
                    "have no places of yours. Replace or drop the whole message.",
                    param=field,
                )
        sent = [(index, shown.get(index, each)) for index, each in enumerate(chat.messages)]
        replaced = replace_messages(raw, sent, chat.messages)
        return parse_chat(replaced, headers, tenant, clock=self.clock, bodies=bodies)


CHAT = Api(ChatCall.path, "/v1/leyline/count_tokens", ChatCall)
