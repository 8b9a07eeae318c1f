"""``/v1/responses`` as a WebSocket: each ``response.create`` is a request of the HTTP route.

A connection gives a request what HTTP would: a scope, a body, and a way to see that the client has
gone. So keys, limits, queueing, policies, sessions and metrics are the route's own.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Protocol

import structlog
from starlette.requests import HTTPConnection, Request
from starlette.types import Message, Receive, Scope, Send

from ..apis.fields import FieldError
from ..apis.responses.socket import Create, read_frame
from ..errors import BadRequestError, LimitError, NotFoundError, ProxyError
from ..sessions.stored_responses import ConnectionResponses
from ..tenants import Tenant
from ..wiring.services import Services
from .caller import caller_of
from .errors import as_proxy_error
from .exchange import UNKNOWN, Exchange
from .limits import checked_json
from .responses import RESPONSES
from .socket_calls import FramedAnswer, PrepareExchange, connected_api, failure_frame, refuse_socket
from .turn import TurnExchange

MAX_LANES = 8
"""Lanes of one connection with a request under way."""
MAX_WAITING = 16
"""Requests of one connection that wait for the one in front of them."""


@dataclass(frozen=True, slots=True)
class Received:
    """A request, and its place among those of its tenant that are being read. It keeps the place
    until it runs, because its body is in memory."""

    create: Create
    reading: ExitStack


class Lanes:
    """Runs requests.

    Args:
        run: answers one; it raises nothing.
        max_bytes: of all waiting requests together.
    """

    def __init__(self, run: Callable[[Create], Awaitable[None]], *, max_bytes: int) -> None:
        self._run = run
        self._max_bytes = max_bytes
        self._waiting: dict[str | None, deque[Received]] = {}
        self._tasks: dict[str | None, asyncio.Task[None]] = {}
        self.idle_since = asyncio.get_running_loop().time()
        """Time of the event loop since which nothing has run."""

    @property
    def busy(self) -> bool:
        """True while a request is under way."""
        return bool(self._tasks)

    def add(self, received: Received) -> None:
        """Run a request after those of its lane.

        Raises:
            LimitError: too many are under way, or wait.
        """
        create = received.create
        if create.lane not in self._tasks:
            if len(self._tasks) >= MAX_LANES:
                raise _limit(
                    f"{MAX_LANES} lanes of this connection have a request under way; wait for one, "
                    "or open another connection.",
                    param="stream_id",
                )
            self._waiting[create.lane] = deque((received,))
            self._tasks[create.lane] = asyncio.create_task(self._serve(create.lane))
            return
        waiting = [each for lane in self._waiting.values() for each in lane]
        size = sum(len(each.create.body) for each in waiting) + len(create.body)
        if len(waiting) >= MAX_WAITING or size > self._max_bytes:
            raise _limit(
                f"Too many requests of this connection wait ({MAX_WAITING} requests, "
                f"{self._max_bytes} bytes); read the answers first."
            )
        self._waiting[create.lane].append(received)

    def give_up_waiting(self) -> list[Create]:
        """Return the requests that haven't begun, which then won't."""
        dropped = [each for lane in self._waiting.values() for each in lane]
        for lane in self._waiting.values():
            lane.clear()
        for each in dropped:
            each.reading.close()
        return [each.create for each in dropped]

    async def settled(self) -> None:
        """Wait until nothing runs."""
        while self._tasks:
            await asyncio.wait(self._tasks.values())

    async def aclose(self) -> None:
        """Stop everything."""
        tasks = [*self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, lane: str | None) -> None:
        waiting = self._waiting[lane]
        try:
            while waiting:
                received = waiting.popleft()
                received.reading.close()
                await self._run(received.create)
                del received  # its body
        finally:
            del self._waiting[lane], self._tasks[lane]
            self.idle_since = asyncio.get_running_loop().time()


def _limit(message: str, param: str | None = None) -> LimitError:
    return LimitError(message, param=param, code="too_many_in_flight")


log = structlog.get_logger("leyline.http")

RECEPTION = "leyline.reception"
"""Extension of the scope: the connection's :class:`Reception`."""
BEGINS = "leyline.message"
"""Type of the event that announces a message."""

SHORT_MESSAGE = 1024
"""Bytes of a message that is read before it is admitted: it may ask for nothing."""

_MAX_BAD_FRAMES = 16
"""Frames in a row that can't be read, after which the connection ends."""
_MAX_IDLE_FRAMES = 64
"""Frames in a row that ask for nothing, likewise."""
_LEAVING_S = 10.0
"""Time in which requests notice that their client has gone; then they are stopped."""
_OWN = (b"sec-websocket-", b"content-")
_OF_CONNECTION = frozenset({b"connection", b"upgrade", b"transfer-encoding", b"expect"})


class Reception(Protocol):
    """A connection that reads messages once they are wanted."""

    drain: asyncio.Event
    """Set once the server begins to stop."""

    def take(self, max_bytes: int) -> None:
        """Read the message that was announced, of a body of ``max_bytes`` at most."""

    def refuse(self) -> None:
        """Throw it away."""


class _Unannounced:
    """The :class:`Reception` of servers that read messages whole."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()

    def take(self, max_bytes: int) -> None:
        """Do nothing."""

    def refuse(self) -> None:
        """Do nothing."""


class SocketsOffError(ProxyError):
    """The proxy takes no WebSocket connections; agents continue over HTTP."""

    status = 426
    kind = "invalid_request_error"
    code = "websockets_off"


class EndingError(ProxyError):
    """A request came while its connection ended."""

    status = 503
    kind = "server_error"


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a connection."""

    code: int
    reason: str
    error: EndingError | None = None
    """For requests that come too late; sent in any case if ``told``."""
    told: bool = False


DRAINED = Ending(
    1001,
    "The proxy stops.",
    EndingError("The proxy stops. Send the request on another connection.", code="stopping"),
)
AGED = Ending(
    1000,
    "The connection is too old.",
    EndingError(
        "This connection has reached its longest life (websocket_life_s). Open another one.",
        code="websocket_connection_limit_reached",
    ),
    told=True,
)
IDLE = Ending(1000, "No request came for a while (websocket_idle_s).")
CONFUSED = Ending(1008, "Too many frames can't be read.")


class ResponseSockets:
    """Takes the WebSocket connections of one process."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._open: Counter[str] = Counter()
        """Connections by tenant."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection, or refuse it before it opens."""
        await receive()  # websocket.connect
        try:
            tenant = await self._admitted(scope)
        except Exception as error:
            shown = as_proxy_error(error)
            counted = self._services.metrics.requests
            counted.labels(UNKNOWN, UNKNOWN, RESPONSES.path, str(shown.status)).inc()
            await refuse_socket(shown, scope, receive, send)
            return
        self._open[tenant.name] += 1
        try:
            await ResponseSocket(self._services, tenant, scope, receive, send).serve()
        finally:
            self._open[tenant.name] -= 1
            if not self._open[tenant.name]:
                del self._open[tenant.name]

    async def _admitted(self, scope: Scope) -> Tenant:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path != RESPONSES.path:
            raise NotFoundError(
                f"WebSocket connections are taken at {RESPONSES.path} only; use HTTP here."
            )
        tenant = await caller_of(self._services, HTTPConnection(scope))
        most = self._services.settings.max_websockets
        if most == 0:
            raise SocketsOffError(
                "This proxy takes no WebSocket connections (max_websockets). Send the request over "
                "HTTP."
            )
        if self._open[tenant.name] >= most:
            raise LimitError(
                f"{most} WebSocket connections of this tenant are open (max_websockets). Close "
                "one, or send the request over HTTP.",
                code="too_many_websockets",
            )
        return tenant


class ResponseSocket:
    """Serves one open connection."""

    def __init__(
        self, services: Services, tenant: Tenant, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self._services = services
        self._tenant = tenant
        self._receive = receive
        self._send = send
        self._scope = _request_scope(scope)
        self._reception: Reception = scope.get("extensions", {}).get(RECEPTION) or _Unannounced()
        self._reading: ExitStack | None = None
        """The place of a message that was announced and admitted."""
        self._gone = asyncio.Event()
        """Set once the client has gone."""
        self._held = ConnectionResponses(services.responses, services.connected)
        self._api = connected_api(self._held)
        self._lanes = Lanes(self._run, max_bytes=tenant.limits.max_body_bytes)
        self._ending: Ending | None = None

    async def serve(self) -> None:
        """Accept the connection, and answer its requests until it ends."""
        await self._put({"type": "websocket.accept"})
        reading = asyncio.create_task(self._read())
        ending = asyncio.create_task(self._end_of_time())
        try:
            await asyncio.wait((reading, ending), return_when=asyncio.FIRST_COMPLETED)
            end = reading.result() if reading.done() else ending.result()
            if end is not None:
                await self._end(end, reading)
        finally:
            self._gone.set()
            self._lanes.give_up_waiting()
            for task in (reading, ending):
                task.cancel()
            await asyncio.gather(reading, ending, return_exceptions=True)
            with suppress(TimeoutError):
                async with asyncio.timeout(_LEAVING_S):
                    await self._lanes.settled()
            await self._lanes.aclose()
            await self._held.aclose()
            if self._reading is not None:
                self._reading.close()

    async def _read(self) -> Ending | None:
        """Take the client's frames. Return None once it has gone."""
        bad = idle = 0
        while (message := await self._receive())["type"] != "websocket.disconnect":
            try:
                if message["type"] == BEGINS:
                    await self._announced()
                    continue
                idle = 0 if await self._take(message) else idle + 1
                bad = 0
            except ProxyError as error:
                bad += not isinstance(error, LimitError | EndingError)
                await self._frame(failure_frame(error))
            if bad >= _MAX_BAD_FRAMES or idle >= _MAX_IDLE_FRAMES:
                return CONFUSED
        return None

    async def _announced(self) -> None:
        """Admit the message that begins, or refuse to read it."""
        try:
            self._reading = await self._admit()
        except BaseException:
            self._reception.refuse()
            raise
        self._reception.take(self._tenant.limits.max_body_bytes)

    async def _admit(self) -> ExitStack:
        """Count a request, and return its place among those that are being read.

        Raises:
            ProxyError: it has none, or the caller may not ask any more.
        """
        self._check_ending()
        gate, connection = self._services.gate, HTTPConnection(self._scope)
        try:
            self._tenant = await caller_of(self._services, connection)
            await gate.check_rate(self._tenant)
            with ExitStack() as reading:
                reading.enter_context(gate.reading(self._tenant))
                return reading.pop_all()
        except ProxyError as error:
            counted = self._services.metrics.requests
            status = str(error.status)
            counted.labels(self._tenant.name, UNKNOWN, RESPONSES.path, status).inc()
            raise

    async def _take(self, message: Message) -> bool:
        """Take a message. Return False if it asks for nothing."""
        reading, self._reading = self._reading, None
        try:
            text = message.get("text")
            if text is None:
                raise BadRequestError("Frames must be text, with one JSON object each.")
            if reading is None and len(text) > SHORT_MESSAGE:
                reading = await self._admit()
            most = self._tenant.limits.max_body_values
            create = _read(await checked_json(text.encode(), most))
            if create is None:
                return False
            reading = reading or await self._admit()
            self._check_ending()
            self._lanes.add(Received(create, reading))
            reading = None
            return True
        finally:
            if reading is not None:
                reading.close()

    def _check_ending(self) -> None:
        if self._ending is not None and self._ending.error is not None:
            raise self._ending.error

    async def _end_of_time(self) -> Ending:
        """Return the reason to end the connection, once there is one."""
        settings, now = self._services.settings, asyncio.get_running_loop().time
        oldest = now() + settings.websocket_life_s
        while not self._reception.drain.is_set():
            busy, idle_s = self._lanes.busy, settings.websocket_idle_s
            idle = now() + idle_s if busy else self._lanes.idle_since + idle_s
            if now() >= oldest:
                return AGED
            if now() >= idle:
                return IDLE
            due = min(oldest, idle)
            with suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await self._reception.drain.wait()
        return DRAINED

    async def _end(self, end: Ending, reading: asyncio.Task[Ending | None]) -> None:
        """Finish the requests under way, then close."""
        self._ending = end
        for create in self._lanes.give_up_waiting():
            error = end.error or EndingError(end.reason, code="connection_ends")
            await self._frame(failure_frame(error, create.lane))
        finishing = asyncio.create_task(self._lanes.settled())
        waited = {finishing} if reading.done() else {finishing, reading}
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not finishing.done():
                return  # the client has gone
        finally:
            finishing.cancel()
        if end.told and end.error is not None:
            await self._frame(failure_frame(end.error))
        await self._put({"type": "websocket.close", "code": end.code, "reason": end.reason})

    async def _run(self, create: Create) -> None:
        """Answer one request."""
        scope = {**self._scope, "headers": [*_without(self._scope["headers"], create)]}
        body: list[Message] = [{"type": "http.request", "body": create.body, "more_body": False}]

        async def receive() -> Message:
            if body:
                return body.pop()
            await self._gone.wait()
            return {"type": "http.disconnect"}

        send = FramedAnswer(self._frame, create.lane)
        request = Request(scope, receive, send)
        exchange: Exchange
        if create.generates:
            exchange = TurnExchange(self._services, request, self._api)
        else:
            exchange = PrepareExchange(self._services, request, self._held)
        exchange.admitted = True
        await exchange(scope, receive, send)

    async def _frame(self, data: bytes) -> None:
        await self._put({"type": "websocket.send", "text": data.decode()})

    async def _put(self, message: Message) -> None:
        with suppress(OSError):  # the client has gone, which the reader reports
            await self._send(message)


def _read(raw: bytes) -> Create | None:
    try:
        return read_frame(raw)
    except FieldError as error:
        raise BadRequestError(str(error), param=error.param or None, code=error.code) from error


def _request_scope(scope: Scope) -> Scope:
    """Return the scope of the same client's requests over HTTP."""
    kept = [
        (name, value)
        for name, value in scope["headers"]
        if name not in _OF_CONNECTION and not name.startswith(_OWN)
    ]
    return {
        **{name: value for name, value in scope.items() if name != "subprotocols"},
        "type": "http",
        "method": "POST",
        "scheme": "https" if scope["scheme"] == "wss" else "http",
        "headers": [*kept, (b"content-type", b"application/json")],
        "extensions": {},
    }


def _without(headers: list[tuple[bytes, bytes]], create: Create) -> list[tuple[bytes, bytes]]:
    """Return the headers with the request's own in place of the connection's."""
    own = {name.encode(): value.encode() for name, value in create.headers.items()}
    return [*(item for item in headers if item[0] not in own), *own.items()]
