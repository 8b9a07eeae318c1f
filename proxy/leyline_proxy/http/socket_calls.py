"""Requests of a WebSocket connection: the HTTP route's, over responses that the connection has, and
their answers as frames."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import orjson
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from ..apis.events import Event, encoded
from ..apis.responses.answer import usage_of
from ..apis.responses.request import map_request
from ..apis.responses.socket import NOT_HTTP, error_frame, framed
from ..apis.responses.stored import joined
from ..errors import ProxyError
from ..model.clock import TurnClock
from ..model.stored_response import StoredResponse
from ..request.wire import add_members
from ..sessions.stored_responses import ConnectionResponses
from ..tenants import Tenant
from ..wiring.services import Services
from .api import Api
from .errors import error_body, shaped_response
from .exchange import Exchange
from .limits import until_disconnect
from .responses import RESPONSES, ResponsesCall, own_items, request_errors
from .sse import DONE, STREAM_HEADERS, EventSplitter, event_data

_NO_TOKENS = {"prompt_tokens": 0, "cached_tokens": 0, "completion_tokens": 0}

SendText = Callable[[bytes], Awaitable[None]]
_STREAM = b"text/event-stream"
_EXTENSION = "websocket.http.response"
_POLICY_VIOLATION = 1008


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

    def decoded(self, raw: bytes) -> dict[str, Any]:
        """Return the members that the request has over HTTP."""
        body = super().decoded(raw)
        return {name: value for name, value in body.items() if name not in NOT_HTTP}

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
        with request_errors():
            return await self._prepared(tenant, raw)

    async def _prepared(self, tenant: Tenant, raw: bytes) -> tuple[str, list[Event]]:
        given = await self.given(tenant, raw, may_be_empty=True)
        chain, opens = given.chain, self.opens(tenant, given.model)
        mapping = map_request(given.body, given.items, joined(chain), opens=opens)
        opening = self.opening_of(given, mapping)
        response = {**opening.document("completed"), "usage": usage_of(_NO_TOKENS)}
        stored = StoredResponse(
            id=self.identifier,
            session=chain[-1].session if chain else "",
            previous=given.previous,
            input=own_items(given.items, self._key),
            response=response,
        )
        await self.keep(tenant.name, stored, store=given.store)
        begun = {**opening.document("in_progress"), "usage": None}
        return given.model, [
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


class FramedAnswer:
    """An ASGI ``send`` that sends events as frames, and errors as error events.

    Args:
        send: sends one frame.
        lane: lane of the request.
    """

    def __init__(self, send: SendText, lane: str | None) -> None:
        self._send = send
        self._lane = lane
        self._status = 0
        self._headers: dict[str, str] = {}
        self._streams = False
        self._splitter = EventSplitter()
        self._body = bytearray()

    async def __call__(self, message: Message) -> None:
        """Send a part of the answer."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            headers = dict(message["headers"])
            self._streams = headers.get(b"content-type", b"").startswith(_STREAM)
            self._headers = _shown(headers)
            return
        chunk = message.get("body", b"")
        if self._streams:
            await self._events(chunk)
        else:
            self._body += chunk
            if not message.get("more_body", False):
                body = bytes(self._body)
                await self._send(error_frame(self._status, body, self._headers, self._lane))

    async def _events(self, chunk: bytes) -> None:
        for event in self._splitter.feed(chunk):
            data = event_data(event)
            if data and data != DONE:  # a comment keeps an HTTP connection alive; pings do it here
                await self._send(self._in_lane(framed(data)))

    def _in_lane(self, data: bytes) -> bytes:
        if self._lane is None:
            return data
        return add_members(data, {"stream_id": orjson.dumps(self._lane)})


def failure_frame(error: ProxyError, lane: str | None = None) -> bytes:
    """Return an error as a frame."""
    headers = {name: value for name, value in error.headers.items() if name == "retry-after"}
    return error_frame(error.status, error_body(error), headers, lane)


async def refuse_socket(error: ProxyError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer the handshake of a connection with an error of the API, so that it doesn't open."""
    if _EXTENSION not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
        return
    asked = Request({**scope, "type": "http", "method": "GET"})
    await shaped_response(asked, error)(scope, receive, send)


def _shown(headers: dict[bytes, bytes]) -> dict[str, str]:
    return {
        name.decode("latin-1"): value.decode("latin-1")
        for name, value in headers.items()
        if name == b"retry-after" or name.startswith(b"x-leyline-")
    }
