"""Connections with limits, beyond those that uvicorn has.

uvicorn bounds the memory of a connection: it stops reading a body that nobody reads, and stops
writing to a client that doesn't read. It has no limit for time, nor, with the parser in C, for
headers. These are here; what needs an answer in an API's shape (a body that is too large or too
slow) is left to the routes.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_PROBE_AFTER_S = 60
_PROBE_EVERY_S = 15
_PROBES = 4


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What one connection, and all of them, may take up."""

    max_connections: int = 8192
    max_header_bytes: int = 64 * 1024
    max_headers: int = 200
    header_timeout_s: float = 30.0
    stall_timeout_s: float = 120.0


class _HeadersTooLargeError(Exception):
    """Aborts the parser; becomes a 431."""


class LimitedProtocol(HttpToolsProtocol):
    """HTTP/1.1 with limits. Subclasses set ``limits``; :func:`limited_protocol` makes one."""

    limits = ConnectionLimits()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._idle_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._in_headers = False
        self._header_bytes = 0
        self._unfinished_bytes = 0
        """Of headers that began with an earlier read."""
        self._turned_away = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Turn the connection away, or give it its time for the first headers."""
        if len(self.connections) >= self.limits.max_connections:
            self._turned_away = True
            self.transport = transport
            self._answer_and_close(HTTPStatus.SERVICE_UNAVAILABLE, b"retry-after: 1\r\n")
            return
        super().connection_made(transport)
        _notice_dead_peers(transport, self.limits.stall_timeout_s)
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is timed any more."""
        self._stop_idle_timer()
        self._stop_stall_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse, and watch what isn't complete."""
        if self._turned_away or self.transport.is_closing():
            return
        was_in_headers, cycle = self._in_headers, self.cycle
        # Unless what was read may begin with the rest of a body that was answered before its end.
        begins = cycle is None or (cycle.response_complete and not cycle.more_body)
        super().data_received(data)
        if self._in_headers and (was_in_headers or (begins and self.cycle is cycle)):
            self._unfinished_bytes += len(data)
            if self._unfinished_bytes > self.limits.max_header_bytes:
                self._answer_and_close(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        elif self._between_requests() and self._idle_timer is None:
            # Blank lines before a request, or the rest of a body that was answered before its
            # end: uvicorn has stopped its own timer for them.
            self._expect_headers()

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._in_headers = True
        self._header_bytes = self._unfinished_bytes = 0
        if self._idle_timer is None:
            self._expect_headers()

    def on_url(self, url: bytes) -> None:
        """A part of the request's path."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header is complete."""
        self._count(len(name) + len(value))
        if len(self.headers) >= self.limits.max_headers:
            raise _HeadersTooLargeError
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The request is on its way; its body is timed by whoever reads it."""
        self._in_headers = False
        self._stop_idle_timer()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """What can't be parsed, or was aborted here."""
        if self._in_headers and self._over():
            self._answer_and_close(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        else:
            super().send_400_response(msg)

    def pause_writing(self) -> None:
        """The client reads slower than is written; it has its time to catch up."""
        super().pause_writing()
        self._stop_stall_timer()
        self._stall_timer = self.loop.call_later(self.limits.stall_timeout_s, self._stalled)

    def resume_writing(self) -> None:
        """It has."""
        self._stop_stall_timer()
        super().resume_writing()

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > self.limits.max_header_bytes:
            raise _HeadersTooLargeError

    def _over(self) -> bool:
        return (
            self._header_bytes > self.limits.max_header_bytes
            or len(self.headers) >= self.limits.max_headers
        )

    def _between_requests(self) -> bool:
        return not self._in_headers and (self.cycle is None or self.cycle.response_complete)

    def _expect_headers(self) -> None:
        self._idle_timer = self.loop.call_later(self.limits.header_timeout_s, self._too_slow)

    def _too_slow(self) -> None:
        self._idle_timer = None
        if not self.transport.is_closing():
            if self._in_headers:
                self._answer_and_close(HTTPStatus.REQUEST_TIMEOUT)
            else:
                self.transport.close()

    def _stalled(self) -> None:
        # Closing would wait for the client to read what is buffered.
        self._stall_timer = None
        self.transport.abort()

    def _answer_and_close(self, status: HTTPStatus, header: bytes = b"") -> None:
        line = f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode()
        self.transport.write(
            line + header + b"content-length: 0\r\nconnection: close\r\n\r\n",
        )
        self.transport.close()

    def _stop_idle_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None


def limited_protocol(limits: ConnectionLimits) -> type[LimitedProtocol]:
    """The protocol with these limits, for ``uvicorn.Config(http=...)``."""
    return type("ConfiguredProtocol", (LimitedProtocol,), {"limits": limits})


def _notice_dead_peers(transport: asyncio.Transport, unanswered_s: float) -> None:
    """Have the kernel end connections whose peer is gone without a word."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
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
