"""Base of all forwarding routes: metrics, errors, and detection of clients that have gone."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping
from contextlib import aclosing, nullcontext, suppress
from functools import partial
from typing import Any

import httpx
import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ..errors import ClientDisconnected, ProxyError
from ..model.clock import TurnClock
from ..telemetry.metrics import exemplar
from ..telemetry.tracing import current_trace, stage_span
from ..tenants import Tenant
from ..upstream.headers import downstream_headers
from ..wiring.services import Services
from .caller import caller_of
from .errors import StoppingError, as_proxy_error, error_event, shaped_response
from .limits import SHORTER, read_body, until_disconnect
from .relay import Relay
from .signs import Signs
from .sse import PING, STREAM_HEADERS

log = structlog.get_logger("leyline.http")

DISCONNECTED = "disconnected"
UNKNOWN = "unknown"
_LAST_WORDS_S = 0.5
"""Time for the error of a request that a stop cuts off."""


class Exchange(ABC):
    """Serves one request, as an ASGI application, so that nothing buffers its stream.

    Args:
        route: name in metrics and traces.
    """

    spends = False
    """True if requests are charged to budgets."""
    max_bytes: int | None = None
    """Largest body, if that is less than a tenant's own limit."""
    way_out = SHORTER
    """Advice about a longer body."""
    admitted = False
    """True if the request was counted, and its body read, before it came here."""
    decodes = True
    """False if bodies may be no JSON."""
    ping = PING
    """A sign of life within a stream."""

    def __init__(self, services: Services, request: Request, route: str) -> None:
        self.services = services
        self.request = request
        self.route = route
        self.clock = TurnClock()
        self.extra_headers: dict[str, str] = {}
        """Headers of every response from here on, errors included."""
        self.status = "500"
        self.model = UNKNOWN
        self.complete = False
        """True once everything that matters has been sent; a disconnect is then not logged."""
        self.message_id: str | None = None
        """Id of the turn, once there is one."""
        self.signs: Signs | None = None
        """Signs of life, once the answer is known to be a stream."""
        self._tenant = UNKNOWN
        self._started = False
        self._ended = False
        self._sending = asyncio.Lock()
        """Keeps what is sent by a sign apart from the answer itself."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request, count it in all cases, and end its trace."""
        asked = self.request
        with self.services.tracing.request(asked.method, self.route, asked.headers) as trace:
            try:
                await self._answered(scope, receive, send)
            finally:
                trace.describe({"leyline.tenant": self._tenant, "leyline.model": self.model})
                trace.ended(self.status)
                self._count()

    async def _answered(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            tenant = await caller_of(self.services, self.request)
            self._tenant = tenant.name
            gate, settings = self.services.gate, self.services.settings
            if not self.admitted:
                await gate.check_rate(tenant)
            if self.spends:
                await self.services.budgets.check(tenant)
            with nullcontext() if self.admitted else gate.reading(tenant), stage_span("read"):
                own = tenant.limits.max_body_bytes
                raw = await read_body(
                    self.request,
                    min(own, self.max_bytes or own),
                    self.way_out,
                    timeout_s=settings.body_timeout_s,
                    values=tenant.limits.max_body_values if self.decodes else None,
                )
            async with gate.place(tenant, lambda wait: _queued(receive, wait)):
                await self.serve(tenant, raw, scope, receive, send)
        except ClientDisconnected:
            if not self.complete:
                self.status = DISCONNECTED
                log.info("client_disconnected", tenant=self._tenant, route=self.route)
        except asyncio.CancelledError:
            if self.services.shutdown.begun:
                await self._last_words(scope, receive, send)
            raise
        except Exception as error:
            await self._fail(as_proxy_error(error), scope, receive, send)

    async def _last_words(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Tell the client of a request that outlasts the grace of a stop why it ends."""
        with suppress(Exception):  # the connection may have gone, or its client reads nothing
            async with asyncio.timeout(_LAST_WORDS_S):
                await self._fail(StoppingError(), scope, receive, send)

    @abstractmethod
    async def serve(
        self, tenant: Tenant, raw: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer the request.

        Raises:
            ProxyError: the exchange answers with this error.
        """

    @property
    def started(self) -> bool:
        """True once the client was sent a status line."""
        return self._started

    async def start_stream(
        self, send: Send, headers: Mapping[str, str], status: int = 200, first: bytes = b""
    ) -> None:
        """Send the status line of a stream, and its first part."""
        answer = Response(headers={**headers, **self.extra_headers})
        raw = [item for item in answer.raw_headers if item[0] != b"content-length"]
        self._started, self.status = True, str(status)
        start: Message = {"type": "http.response.start", "status": status, "headers": raw}
        await self._put(send, start, *((_part(first),) if first else ()))

    async def send_chunk(self, send: Send, chunk: bytes) -> None:
        """Send a part of the stream."""
        await self._put(send, _part(chunk))

    async def _put(self, send: Send, *messages: Message) -> None:
        async with self._sending:
            for message in messages:
                if not self._ended:  # a sign may come too late
                    await send(message)
            if self.signs is not None:
                self.signs.put_off()

    def keep_alive(self, send: Send) -> None:
        """Give signs of life from now on, because the answer is a stream."""
        if (pause_s := self.services.settings.stream_ping_interval_s) > 0:
            self.signs = Signs(partial(self._sign, send), pause_s)

    async def _sign(self, send: Send) -> None:
        if self._sending.locked():  # the client reads nothing
            return
        if self._started:
            await self._put(send, _part(self.ping))
        else:
            await self.start_stream(send, STREAM_HEADERS, first=self.first_sign())

    def first_sign(self) -> bytes:
        """Return the first part of a stream that begins before the engine's answer does."""
        return self.ping

    def settle_status(self) -> None:
        """Give no sign any more: the answer gets a status of its own.

        Only if the stream hasn't started; else it is too late for one.
        """
        if self.signs is not None:
            self.signs.stop()

    async def send_relayed(self, relay: Relay, upstream: httpx.Response, send: Send) -> None:
        """Send an engine's stream as ``relay`` passes it; the status line waits for the first
        event.

        Raises:
            ProxyError: see :meth:`.relay.Relay.events`.
        """
        async with aclosing(relay.events(upstream)) as events:
            async for event in events:
                if not self._started:
                    headers = {**STREAM_HEADERS, **downstream_headers(upstream.headers)}
                    await self.start_stream(send, headers)
                await self.send_chunk(send, event)

    async def end_stream(self, send: Send) -> None:
        """Close the stream."""
        async with self._sending:
            self._ended = True
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def answer(self, response: Response, scope: Scope, receive: Receive, send: Send) -> None:
        """Send a whole response."""
        self.status = str(response.status_code)
        self._started = True
        await response(scope, receive, send)

    def failure(self, error: ProxyError) -> Response:
        """Return ``error`` in the shape of the route's API."""
        return shaped_response(self.request, error, self.extra_headers)

    def failure_event(self, error: ProxyError) -> bytes:
        """Return ``error`` as an event of a stream."""
        return error_event(error)

    async def _fail(self, error: ProxyError, scope: Scope, receive: Receive, send: Send) -> None:
        self.status = str(error.status)
        current_trace().failed(error)
        if not self._started:
            await self.failure(error)(scope, receive, send)
            return
        # Too late for a status. An error event without [DONE] keeps clients from taking the
        # partial answer for a whole one.
        await self.send_chunk(send, self.failure_event(error))
        await self.end_stream(send)

    def _count(self) -> None:
        metrics = self.services.metrics
        metrics.requests.labels(self._tenant, self.model, self.route, self.status).inc()
        metrics.request_seconds.labels(self._tenant, self.model, self.route).observe(
            self.clock.elapsed_s, exemplar(self.message_id)
        )


class ServedBy(Response):
    """The response of an exchange, for routes of the framework."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self._exchange = exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the exchange."""
        await self._exchange(scope, receive, send)


def _part(chunk: bytes) -> Message:
    return {"type": "http.response.body", "body": chunk, "more_body": True}


async def _queued(receive: Receive, wait: Coroutine[Any, Any, None]) -> None:
    with stage_span("queue"):
        await until_disconnect(receive, wait)
