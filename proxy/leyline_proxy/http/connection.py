"""Connections with more limits than uvicorn's.

uvicorn bounds the memory of a connection: it stops reading a body that the application doesn't
read, and stops writing to a client that doesn't read. It has no time limits. With the parser in C,
it also has no limit for parts that the parser reports only at their end: headers, trailers, chunk
extensions. This module adds these limits. Errors that need an answer in an API's shape (a body that
is too large or too slow) are left to the routes.

At shutdown a connection ends with an answer: to the request under way, or to the one that the
client may be sending just then.
"""

from __future__ import annotations

import asyncio
import select
import socket
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..shutdown import Shutdown
from .caller import CERTIFICATE, certificate_names
from .stalling import StallTimer

_PROBE_AFTER_S = 60
_PROBE_EVERY_S = 15
_PROBES = 4

_MAX_PIPELINED = 64
"""Requests of one connection that wait for an earlier one; nearly no client sends any."""
_FRAMES_PER_BYTE = 2
"""Bytes of framing that a byte of a body pays for."""

_LINGER_S = 2.0
_LINGER_BYTES = 1024 * 1024
"""Bytes still read after an answer that ends a connection."""
_MAX_TURNED_AWAY = 256
"""Connections beyond the limit that may linger so; others are closed at once."""
_LAST_REQUEST_S = 1
"""Seconds that an idle connection has for another request once shutdown has begun."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of one connection, and of their number."""

    max_connections: int = 8192
    max_header_bytes: int = 64 * 1024
    max_headers: int = 200
    header_timeout_s: float = 30.0
    stall_timeout_s: float = 120.0


class _TooMuchError(Exception):
    """Aborts the parser; becomes a 431."""


@dataclass(frozen=True, slots=True)
class Shared:
    """State shared by the connections of one server."""

    shutdown: Shutdown = field(default_factory=Shutdown)
    lingering: set[LimitedProtocol] = field(default_factory=set)
    """Connections beyond the limit that were turned away and aren't closed yet."""


class LimitedProtocol(HttpToolsProtocol):
    """HTTP/1.1 with limits. Subclasses set them; :func:`limited_protocol` makes one."""

    limits = ConnectionLimits()
    shared = Shared()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._idle_timer: asyncio.TimerHandle | None = None
        self._stall_timer = StallTimer(self.loop, self.limits.stall_timeout_s, self._stalled)
        self._in_headers = False
        self._header_bytes = self._headers = 0
        """Counts of the request that is being read, trailers included."""
        self._unfinished_bytes = 0
        """Bytes read since the parser's last callback."""
        self._upgraded = False
        """True once the connection is a WebSocket's, which has another protocol."""
        self._names: tuple[str, ...] | None = None
        """Names in the client's certificate; None if it showed none."""
        self._leaving = False
        self._discarded: int | None = None
        """Bytes read and discarded since the answer that ends the connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Turn the connection away, or start the timer for its first headers."""
        _without_delay(transport, self.limits.stall_timeout_s)
        if len(self.connections) >= self.limits.max_connections:
            self.transport = transport
            self._turn_away()
            return
        super().connection_made(transport)
        self._names = certificate_names(transport)
        self._expect_headers()
        if self.shared.shutdown.begun:
            self.shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers."""
        self._stop_idle_timer()
        self._stall_timer.stop()
        self.shared.lingering.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse the data, and limit parts that aren't complete."""
        # In pieces, so that the unreported bytes are known to within one piece.
        size = self.limits.max_header_bytes
        for start in range(0, len(data), size):
            if self._discarded is not None:
                self._discard(len(data) - start)
                return
            if self._upgraded or self.transport.is_closing():
                return
            self._parse(data[start : start + size])
        if self._upgraded:
            return
        if self._discarded is None and self._between_requests() and self._idle_timer is None:
            # Blank lines before a request, or the rest of a body answered before its end: uvicorn
            # has stopped its own timer for them.
            self._expect_headers()

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        scope: Any = self.scope
        scope[CERTIFICATE] = self._names
        self._in_headers = True
        self._header_bytes = self._headers = self._unfinished_bytes = 0
        if self._idle_timer is None:
            self._expect_headers()

    def on_url(self, url: bytes) -> None:
        """Count a part of the request's path."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header. Trailers are dropped, because they come after the checks of headers."""
        self._count(len(name) + len(value))
        self._headers += 1
        if self._headers > self.limits.max_headers:
            raise _TooMuchError
        if self._in_headers:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request. The reader of its body times the body."""
        self._in_headers = False
        self._unfinished_bytes = 0
        self._stop_idle_timer()
        if len(self.pipeline) >= _MAX_PIPELINED:
            raise _TooMuchError
        super().on_headers_complete()
        if self.shared.shutdown.begun and self.cycle is not None:
            self.cycle.keep_alive = False

    def handle_websocket_upgrade(self) -> None:
        """Hand the connection over, unless an earlier request is still being answered."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._refuse(HTTPStatus.BAD_REQUEST)
            return
        self._upgraded = True
        self._stop_idle_timer()
        self._stall_timer.stop()
        super().handle_websocket_upgrade()

    def on_body(self, body: bytes) -> None:
        """Take a part of the body, and allow some bytes for its framing."""
        self._unfinished_bytes = max(0, self._unfinished_bytes - _FRAMES_PER_BYTE * len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the request."""
        self._unfinished_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that can't be parsed, or that was aborted here."""
        if self._too_much():
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        else:
            self._refuse(HTTPStatus.BAD_REQUEST)

    def shutdown(self) -> None:
        """End with an answer: to the request under way, or to one that comes in time."""
        if self._discarded is not None or self._leaving:
            return
        self._leaving = True
        # An answer that has begun promised to keep the connection; the next one revokes that.
        self.timeout_keep_alive = _LAST_REQUEST_S
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = self.cycle.keep_alive and self.cycle.response_started
        elif not self._in_headers:
            self._close_if_idle_in(_LAST_REQUEST_S)

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, unless it has an unread request."""
        if _has_come(self.transport):
            self._close_if_idle_in(_LAST_REQUEST_S)
        else:
            super().timeout_keep_alive_handler()

    def pause_writing(self) -> None:
        """Start the time limit for a client that reads too slowly."""
        super().pause_writing()
        self._stall_timer.start()

    def resume_writing(self) -> None:
        """Stop the time limit: the client has caught up."""
        self._stall_timer.stop()
        super().resume_writing()

    def _should_upgrade(self) -> bool:
        return bool(self.scope["method"] == "GET" and super()._should_upgrade())

    def _parse(self, piece: bytes) -> None:
        self._unfinished_bytes += len(piece)
        super().data_received(piece)
        if self._discarded is None and self._unfinished_bytes > self.limits.max_header_bytes:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def _count(self, size: int) -> None:
        self._unfinished_bytes = 0
        self._header_bytes += size
        if self._header_bytes > self.limits.max_header_bytes:
            raise _TooMuchError

    def _too_much(self) -> bool:
        return (
            self._header_bytes > self.limits.max_header_bytes
            or self._headers > self.limits.max_headers
            or len(self.pipeline) >= _MAX_PIPELINED
        )

    def _between_requests(self) -> bool:
        return not self._in_headers and (self.cycle is None or self.cycle.response_complete)

    def _expect_headers(self) -> None:
        self._idle_timer = self.loop.call_later(self.limits.header_timeout_s, self._too_slow)

    def _close_if_idle_in(self, seconds: float) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(
            seconds, self.timeout_keep_alive_handler
        )

    def _too_slow(self) -> None:
        self._idle_timer = None
        if not self.transport.is_closing():
            if self._in_headers:
                self._refuse(HTTPStatus.REQUEST_TIMEOUT)
            else:
                self.transport.close()

    def _stalled(self) -> None:
        self.transport.abort()

    def _turn_away(self) -> None:
        lingering = self.shared.lingering
        self._answer(HTTPStatus.SERVICE_UNAVAILABLE, b"retry-after: 1\r\n")
        if len(lingering) < _MAX_TURNED_AWAY:
            lingering.add(self)
            self._linger()
        else:
            self._discarded = 0
            self.transport.close()

    def _refuse(self, status: HTTPStatus) -> None:
        """End the connection. Answer the request if no other is under way and its own answer
        hasn't begun."""
        cycle, own = self.cycle, not self._in_headers
        if own:
            free = not self.pipeline and (cycle is None or not cycle.response_started)
        else:
            free = cycle is None or cycle.response_complete
        if not free:
            self._discarded = 0
            self.transport.close()
            return
        if cycle is not None:
            cycle.disconnected = True
            cycle.message_event.set()
        self._answer(status)
        self._linger()

    def _answer(self, status: HTTPStatus, header: bytes = b"") -> None:
        line = f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode()
        self.transport.write(line + header + b"content-length: 0\r\nconnection: close\r\n\r\n")

    def _linger(self) -> None:
        """Keep reading for a while: closing a connection with bytes unread resets it, and a reset
        loses the answer."""
        self._discarded = 0
        self._stop_idle_timer()
        self._unset_keepalive_if_required()
        if self.flow is not None:
            self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._idle_timer = self.loop.call_later(_LINGER_S, self.transport.abort)

    def _discard(self, size: int) -> None:
        self._discarded = (self._discarded or 0) + size
        if self._discarded > _LINGER_BYTES:
            self.transport.abort()

    def _stop_idle_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None


def limited_protocol(
    limits: ConnectionLimits, shutdown: Shutdown | None = None
) -> type[LimitedProtocol]:
    """Return the protocol with these limits, for ``uvicorn.Config(http=...)``.

    Args:
        shutdown: signals when to stop.
    """
    shared = Shared(shutdown or Shutdown())
    return type("ConfiguredProtocol", (LimitedProtocol,), {"limits": limits, "shared": shared})


def _has_come(transport: asyncio.Transport) -> bool:
    """Return True if the peer's bytes wait to be read."""
    sock = transport.get_extra_info("socket")
    if transport.is_closing() or sock is None:
        return False
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def _without_delay(transport: asyncio.Transport, unanswered_s: float) -> None:
    """Send writes at once, and have the kernel end connections whose peer vanished silently."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    # asyncio does it only for sockets that were made with the protocol's number.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _PROBE_AFTER_S),
        ("TCP_KEEPINTVL", _PROBE_EVERY_S),
        ("TCP_KEEPCNT", _PROBES),
        ("TCP_USER_TIMEOUT", int(unanswered_s * 1000)),
    ):
        option = getattr(socket, name, None)  # not every system has them
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
