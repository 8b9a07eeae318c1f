"""WebSocket connections with more limits than uvicorn's."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from .caller import CERTIFICATE, certificate_names
from .response_socket import DRAIN
from .stalling import StallTimer

_CLOSE_S = 2.0
"""Time for the client's part of a close."""
_MAX_FRAGMENTS = 65_536
"""Parts of one message."""
_TOO_BIG = 1009


class LimitedSocket(WebSocketsSansIOProtocol):
    """A WebSocket connection that ends with an answer at shutdown, and cuts off slow readers.

    uvicorn stops reading while a message waits, and pings clients that are silent. Subclasses set
    the limit; :func:`limited_socket` makes one.
    """

    stall_timeout_s = 120.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.close_timeout = _CLOSE_S
        # The library's debug records quote frames, and these are prompts.
        self.conn.debug = False
        self._drain = asyncio.Event()
        self._stall_timer = StallTimer(self.loop, self.stall_timeout_s, self._stalled)

    def data_received(self, data: bytes) -> None:
        """Parse the data. Refuse a handshake that the parser gives up."""
        super().data_received(data)
        if not self.handshake_initiated:
            # It has stricter limits than the server's own, and reports nothing.
            status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            line = f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode()
            self.transport.write(line + b"content-length: 0\r\nconnection: close\r\n\r\n")
            self.transport.close()

    def handle_connect(self, event: Any) -> None:
        """Start the application, which learns of the shutdown from its scope."""
        super().handle_connect(event)
        scope: Any = getattr(self, "scope", None)
        if scope is not None:
            scope["extensions"] = {**scope["extensions"], DRAIN: self._drain}
            scope[CERTIFICATE] = certificate_names(self.transport)

    def handle_cont(self, event: Frame) -> None:
        """Take a part of a message. Empty parts count, too."""
        if len(self.frames) < _MAX_FRAGMENTS:
            super().handle_cont(event)
        elif not self.transport.is_closing():
            self.conn.fail(_TOO_BIG, "too many parts")
            self.handle_parser_exception()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._stall_timer.stop()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Let the application end the connection."""
        self._drain.set()

    def pause_writing(self) -> None:
        """Start the time limit for a client that reads too slowly."""
        super().pause_writing()
        self._stall_timer.start()

    def resume_writing(self) -> None:
        """Stop the time limit: the client has caught up."""
        self._stall_timer.stop()
        super().resume_writing()

    def _stalled(self) -> None:
        self.transport.abort()


def limited_socket(stall_timeout_s: float) -> type[LimitedSocket]:
    """Return the protocol with this limit, for ``uvicorn.Config(ws=...)``."""
    return type("ConfiguredSocket", (LimitedSocket,), {"stall_timeout_s": stall_timeout_s})
