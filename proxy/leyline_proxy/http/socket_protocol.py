"""WebSocket connections with more limits than uvicorn's."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame, Opcode

from ..admission.bucket import TokenBucket
from ..errors import LimitError, ProxyError
from .caller import CERTIFICATE, certificate_names
from .limits import too_large, too_slow
from .response_socket import BEGINS, RECEPTION, SHORT_MESSAGE
from .socket_calls import failure_frame
from .stalling import StallTimer

CONTINUATION, TEXT, BINARY = 0, 1, 2
_CONTROL = 8
_MASK_BYTES = 4
_SIZE_BYTES = {126: 2, 127: 8}
"""Bytes of the size, by the marks that announce it."""

_FREE_PARTS = 1024
"""Parts of a message that may be of any size."""
_BYTES_PER_PART = 1024
"""Bytes of a message that pay for one more."""


@dataclass(frozen=True, slots=True)
class FrameHead:
    """The head of a client's frame."""

    opcode: int
    fin: bool
    """True for the last frame of its message."""
    length: int
    """Bytes of the head itself."""
    size: int
    """Bytes of the payload."""

    @property
    def control(self) -> bool:
        """True for a ping, a pong or a close, which may come between the parts of a message."""
        return self.opcode >= _CONTROL


def read_head(data: bytes | bytearray) -> FrameHead | None:
    """Return the head at the beginning of ``data``; None if it isn't whole. What the protocol
    forbids is left to its parser."""
    if len(data) < 2:
        return None
    first, second = data[0], data[1]
    size = second & 0x7F
    length = 2 + _SIZE_BYTES.get(size, 0)
    if len(data) < length:
        return None
    if size in _SIZE_BYTES:
        size = int.from_bytes(data[2:length], "big")
    length += _MASK_BYTES if second & 0x80 else 0
    if len(data) < length:
        return None
    return FrameHead(first & 0x0F, bool(first & 0x80), length, size)


class MessageCount:
    """Counts the bytes and the parts of one message."""

    def __init__(self) -> None:
        self.bytes = 0
        self.parts = 0

    def add(self, head: FrameHead) -> None:
        """Count a frame of the message."""
        self.bytes += head.size
        self.parts += 1

    @property
    def crumbles(self) -> bool:
        """True if the parts are too many for their bytes: each costs far more than its bytes."""
        return self.parts > _FREE_PARTS + self.bytes // _BYTES_PER_PART


BESIDE_BODY = 4096
"""Bytes of a message besides the request's body."""

_CLOSE_S = 2.0
"""Time for the client's part of a close."""
_READ_ON_BYTES = 64 * 1024 * 1024
"""Bytes still read in that time from a client that is refused while it sends."""
_CONTROL_PER_MINUTE = 600
"""Pings, pongs and closes of one connection."""
_TOO_BIG, _POLICY = 1009, 1008


class LimitedSocket(WebSocketsSansIOProtocol):
    """A WebSocket connection that reads a message only once it is wanted.

    A message is announced to the application when its first frame's head is there, and nothing of
    it is read before the application has taken it, or refused it: then it is thrown away. A short
    one is read at once. One message waits at most, and meanwhile nothing is read.

    The connection ends with an error if a message is too large, too slow or in too many parts, and
    if the client sends too many pings. uvicorn pings clients that are silent. Subclasses set the
    limits; :func:`limited_socket` makes one.
    """

    stall_timeout_s = 120.0
    body_timeout_s = 120.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.close_timeout = _CLOSE_S
        # The library's debug records quote frames, and these are prompts.
        self.conn.debug = False
        self.drain = asyncio.Event()
        self._stall_timer = StallTimer(self.loop, self.stall_timeout_s, self._stalled)
        self._message_timer = StallTimer(self.loop, self.body_timeout_s, self._too_slow)
        self._controls = TokenBucket(_CONTROL_PER_MINUTE, self.loop.time())
        self._unread = bytearray()
        """Bytes received that may not be read yet: never more than one piece of the transport."""
        self._frame_left = 0
        """Bytes of the payload under way."""
        self._frame_skipped = self._frame_ends = False
        """The frame under way is thrown away; it is the last one of its message."""
        self._message: MessageCount | None = None
        """The message under way."""
        self._asked = False
        """True while the application hasn't decided on the message under way."""
        self._skips = False
        """True if the message under way is thrown away."""
        self._limit: int = self.config.ws_max_size
        """Most bytes of the message under way."""
        self._discarded: int | None = None
        """Bytes thrown away since the connection failed."""

    def data_received(self, data: bytes) -> None:
        """Read as far as it is wanted. Refuse a handshake that the parser gives up."""
        if self._discarded is not None:
            self._discarded += len(data)
            if self._discarded > _READ_ON_BYTES:
                self.transport.abort()
        elif self.handshake_initiated:
            self._unread += data
            self._read_on()
        else:
            self._shake_hands(data)

    def _shake_hands(self, data: bytes) -> None:
        super().data_received(data)
        if not self.handshake_initiated:
            # It has stricter limits than the server's own, and reports nothing.
            status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            line = f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode()
            self.transport.write(line + b"content-length: 0\r\nconnection: close\r\n\r\n")
            self.transport.close()

    def handle_connect(self, event: Any) -> None:
        """Start the application, which finds this connection's messages in its scope."""
        super().handle_connect(event)
        scope: Any = getattr(self, "scope", None)
        if scope is not None:
            scope["extensions"] = {**scope["extensions"], RECEPTION: self}
            scope[CERTIFICATE] = certificate_names(self.transport)

    def take(self, max_bytes: int) -> None:
        """Read the message that was announced.

        Args:
            max_bytes: of the request's body in it.
        """
        self._limit = max_bytes + BESIDE_BODY
        self._decided(skips=False)

    def refuse(self) -> None:
        """Throw the message away that was announced."""
        self._decided(skips=True)

    async def receive(self) -> Any:
        """Return the next event for the application, and read on."""
        message = await super().receive()
        self._read_on()
        return message

    async def send(self, message: Any) -> None:
        """Send an event of the application."""
        await super().send(message)
        if message["type"] != "websocket.send":
            self._read_on()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        self._stall_timer.stop()
        self._message_timer.stop()
        self._unread.clear()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Let the application end the connection."""
        self.drain.set()

    def pause_writing(self) -> None:
        """Start the time limit for a client that reads too slowly."""
        super().pause_writing()
        self._stall_timer.start()

    def resume_writing(self) -> None:
        """Stop the time limit: the client has caught up."""
        self._stall_timer.stop()
        super().resume_writing()

    def handle_parser_exception(self) -> None:
        """End a connection that has failed, so that the client can read why: closing it with bytes
        unread would reset it."""
        close = self.conn.close_sent
        code, reason = (close.code, close.reason) if close is not None else (1006, "")
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self.stop_keepalive()
        self._message_timer.stop()
        self._unread.clear()
        self._discarded = 0
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._resume()
        self.close_timer = self.loop.call_later(_CLOSE_S, self.transport.abort)

    def _read_on(self) -> None:
        """Read what has come, as far as it is wanted; else pause the transport."""
        while self._unread and not self._waits() and (size := self._read_part()):
            del self._unread[:size]
        if self._waits() and self._discarded is None:
            if not self.read_paused:
                self.read_paused = True
                self.transport.pause_reading()
        else:
            self._resume()

    def _resume(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()

    def _waits(self) -> bool:
        """Return True while nothing may be read."""
        if self._discarded is not None or self.close_sent:
            return self._discarded is not None
        return self._asked or not self.handshake_complete or not self.queue.empty()

    def _read_part(self) -> int:
        """Read a frame, or a part of its payload; return its size, 0 if nothing can be read now."""
        if self._frame_left:
            size = min(self._frame_left, len(self._unread))
            self._frame_left -= size
        else:
            head = read_head(self._unread)
            if head is None or not self._may_read(head):
                return 0
            size = min(head.length + head.size, len(self._unread))
            self._begin(head)
            self._frame_left = head.length + head.size - size
        if self._discarded is not None:
            return 0
        if self._frame_ends and not self._frame_left:
            self._message_ended()
        if not self._frame_skipped:
            super().data_received(bytes(self._unread[:size]))
        return size

    def _may_read(self, head: FrameHead) -> bool:
        """Return True if a frame may be read now. Fail, or announce its message, if not."""
        if head.control:
            if self._controls.take(self.loop.time()) > 0:
                self._fail(_POLICY, _too_many("pings"))
            return self._discarded is None
        message = self._message or MessageCount()
        if message.bytes + head.size > self._limit:
            self._fail(_TOO_BIG, too_large(self._limit - BESIDE_BODY))
            return False
        if self._message is None and not self.close_sent and not _is_short(head):
            self._message = message
            self._asked = True
            self._message_timer.start()
            begins: Any = {"type": BEGINS}  # uvicorn's types know only its own events
            self.queue.put_nowait(begins)
            return False
        return True

    def _begin(self, head: FrameHead) -> None:
        """Note a frame that is read from here on."""
        self._frame_ends = head.fin and not head.control
        if head.control:
            self._frame_skipped = False
            return
        if self._message is None:
            self._message = MessageCount()
            self._message_timer.start()
        self._message.add(head)
        self._frame_skipped = self._skips or self.close_sent
        if self._message.crumbles:
            self._fail(_POLICY, _too_many("parts of one message"))

    def _decided(self, *, skips: bool) -> None:
        if self._asked:
            self._asked, self._skips = False, skips
            self._read_on()

    def _message_ended(self) -> None:
        self._message, self._skips = None, False
        self._limit = self.config.ws_max_size
        self._message_timer.stop()

    def _fail(self, code: int, error: ProxyError) -> None:
        """End the connection with an error event and a close."""
        if self._discarded is None and not self.close_sent and not self.transport.is_closing():
            event = Frame(Opcode.TEXT, failure_frame(error))
            self.transport.write(event.serialize(mask=False))
            self.conn.fail(code, error.code)
            self.handle_parser_exception()

    def _too_slow(self) -> None:
        self._fail(_POLICY, too_slow(self.body_timeout_s))

    def _stalled(self) -> None:
        self.transport.abort()


def limited_socket(stall_timeout_s: float, body_timeout_s: float) -> type[LimitedSocket]:
    """Return the protocol with these limits, for ``uvicorn.Config(ws=...)``."""
    limits = {"stall_timeout_s": stall_timeout_s, "body_timeout_s": body_timeout_s}
    return type("ConfiguredSocket", (LimitedSocket,), limits)


def _is_short(head: FrameHead) -> bool:
    return head.fin and head.size <= SHORT_MESSAGE


def _too_many(things: str) -> LimitError:
    return LimitError(f"Too many {things}.", code="too_many_frames")
