"""Requests of a WebSocket connection: the HTTP route's, over responses that the connection has."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from ..apis.events import Event, encoded
from ..apis.responses.answer import Opening, shown_request, usage_of
from ..apis.responses.errors import FieldError
from ..apis.responses.request import input_items, map_request, previous_id, stores
from ..apis.responses.stored import joined
from ..errors import BadRequestError, NotFoundError
from ..model.clock import TurnClock
from ..model.stored_response import StoredResponse
from ..request.parse import decode_body, model_of
from ..sessions.connection_responses import ConnectionResponses
from ..tenants import Tenant
from ..wiring.services import Services
from .api import Api
from .exchange import Exchange
from .limits import until_disconnect
from .paused import STREAM_HEADERS
from .response_chain import read_chain, resolve_references
from .responses import RESPONSES, ResponsesCall, own_items

_NO_TOKENS = {"prompt_tokens": 0, "cached_tokens": 0, "completion_tokens": 0}


class ConnectedCall(ResponsesCall):
    """One request of a connection. What isn't stored is kept for the connection."""

    keeps_all = True

    def __init__(
        self,
        services: Services,
        request: Request,
        clock: TurnClock,
        *,
        runs: bool = True,
        held: ConnectionResponses,
    ) -> None:
        super().__init__(services, request, clock, runs=runs)
        self._held = held

    @property
    def responses(self) -> ConnectionResponses:
        """The responses that the request may continue: the connection's, and stored ones."""
        return self._held

    async def keep(self, tenant: str, stored: StoredResponse, *, store: bool) -> None:
        """Store a response, or keep it for the connection."""
        keep = self._held.put if store else self._held.keep
        await keep(tenant, stored.id, stored)

    async def prepare(self, tenant: Tenant, raw: bytes) -> tuple[str, list[Event]]:
        """Keep a request's input as a response without output, from which others can continue.

        Returns:
            The model, and the events of the response.

        Raises:
            BadRequestError, NotFoundError: as for a request that runs.
        """
        try:
            return await self._prepared(tenant, raw)
        except FieldError as error:
            kind = NotFoundError if error.missing else BadRequestError
            raise kind(str(error), param=error.param, code=error.code) from error

    async def _prepared(self, tenant: Tenant, raw: bytes) -> tuple[str, list[Event]]:
        body = decode_body(raw)
        model, store, previous = model_of(body), stores(body), previous_id(body)
        limit = tenant.limits.max_body_bytes
        chain = await read_chain(self.responses, tenant.name, previous, limit)
        given = input_items(body) if body.get("input") != [] else []
        items = await resolve_references(self.responses, tenant.name, given, limit)
        mapping = map_request(body, items, joined(chain), opens=self.opens(tenant, model))
        opening = Opening(
            key=self._key,
            created_at=int(time.time()),
            model=model,
            shown=shown_request(body, store=store),
            tools=mapping.tools,
            carries_reasoning=mapping.carries_reasoning,
        )
        response = {**opening.document("completed"), "usage": usage_of(_NO_TOKENS)}
        stored = StoredResponse(
            id=self.identifier,
            session=chain[-1].session if chain else "",
            previous=previous,
            input=own_items(items, self._key),
            response=response,
        )
        await self.keep(tenant.name, stored, store=store)
        begun = {**opening.document("in_progress"), "usage": None}
        return model, [
            _event(number, f"response.{status}", response=shown)
            for number, (status, shown) in enumerate((("created", begun), ("completed", response)))
        ]


class PrepareExchange(Exchange):
    """Serves a request with ``generate: false``: it keeps the input, and asks no engine."""

    def __init__(self, services: Services, request: Request, held: ConnectionResponses) -> None:
        super().__init__(services, request, RESPONSES.path)
        self._call = ConnectedCall(services, request, self.clock, held=held)

    async def serve(
        self, tenant: Tenant, raw: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Keep the input, and send the events of a response without output."""
        model, events = await until_disconnect(receive, self._call.prepare(tenant, raw))
        self.model = self.services.pool.label(model)
        await self.start_stream(send, STREAM_HEADERS)
        await self.send_chunk(send, encoded(events))
        self.complete = True
        await self.end_stream(send)


def connected_api(held: ConnectionResponses) -> Api:
    """Return the API of a connection. No engine answers it in this API itself, because the
    connection's responses would be missing."""
    return Api(RESPONSES.path, RESPONSES.count_path, partial(ConnectedCall, held=held))


def _event(number: int, kind: str, **members: Any) -> Event:
    return {"type": kind, "sequence_number": number, **members}
