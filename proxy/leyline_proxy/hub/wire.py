"""The messages between hub and workers: MessagePack in frames with a length.

Both ends are of one installation and are started together, so there are no versions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

import msgspec

from ..sessions.codec import MAX_RECORD

MAX_FRAME = 2 * MAX_RECORD
"""Largest frame in bytes: the longest session, with its history."""

_HEAD = 4
"""Bytes of a frame's length, big endian."""

Q = TypeVar("Q")
A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class Method(Generic[Q, A]):
    """A question to the hub."""

    name: str
    asks: type[Q]
    answers: type[A]


@dataclass(frozen=True, slots=True)
class Topic(Generic[Q]):
    """News from the hub."""

    name: str
    tells: type[Q]


class Ask(msgspec.Struct, array_like=True, tag=0, frozen=True):
    """A worker's question; number 0 wants no answer."""

    number: int
    method: str
    body: msgspec.Raw


class Answer(msgspec.Struct, array_like=True, tag=1, frozen=True):
    """The answer to the question of that number."""

    number: int
    body: msgspec.Raw
    fault: str = ""
    """Name of the error if the hub failed; there is then no body."""


class Push(msgspec.Struct, array_like=True, tag=2, frozen=True):
    """News of a topic."""

    topic: str
    body: msgspec.Raw


Frame = Ask | Answer | Push

_FRAMES = msgspec.msgpack.Decoder(Frame)
_ENCODER = msgspec.msgpack.Encoder()


def packed(value: object) -> msgspec.Raw:
    """Return the body of a frame."""
    return msgspec.Raw(_ENCODER.encode(value))


def unpacked(body: msgspec.Raw, kind: type[A]) -> A:
    """Return a body's content.

    Raises:
        msgspec.MsgspecError: it isn't of this kind.
    """
    return msgspec.msgpack.decode(body, type=kind)


class Connection(asyncio.Protocol):
    """One end of a connection.

    Args:
        received: called with each frame.
        ended: called once the other end has gone, or has sent no frame.
    """

    def __init__(self, received: Callable[[Frame], object], ended: Callable[[], object]) -> None:
        self._received = received
        self._ended = ended
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._out: list[bytes] = []
        self._closing = False
        self._buffer = bytearray()
        self._wanted = _HEAD
        """Bytes that the buffer needs for the next look at it."""
        self.closed = self._loop.create_future()
        """Done once the connection has ended."""

    @property
    def open(self) -> bool:
        """True while frames can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def unsent(self) -> int:
        """Bytes that wait for the other end to read."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def send(self, frame: Frame) -> None:
        """Send a frame, unless the other end has gone; together with others of this moment."""
        if not self.open:
            return
        data = _ENCODER.encode(frame)
        if not self._out:
            self._loop.call_soon(self.flush)
        self._out += (len(data).to_bytes(_HEAD, "big"), data)

    def close(self) -> None:
        """Close the connection, after what was sent."""
        self._closing = True
        self.flush()
        if self._transport is not None:
            self._transport.close()

    def flush(self) -> None:
        """Give what was sent to the system now."""
        if self._transport is not None and self._out:
            self._transport.writelines(self._out)
            self._out = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast("asyncio.Transport", transport)
        if self._closing:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        """Take the frames that are whole."""
        self._buffer += data
        at = 0
        while len(self._buffer) - at >= self._wanted:
            end = at + _HEAD + int.from_bytes(self._buffer[at : at + _HEAD], "big")
            if end - at > MAX_FRAME:
                self.close()
                return
            if len(self._buffer) < end:
                self._wanted = end - at
                break
            self._wanted = _HEAD
            with memoryview(self._buffer) as view:
                frame = bytes(view[at + _HEAD : end])
            at = end
            try:
                self._received(_FRAMES.decode(frame))
            except msgspec.MsgspecError:
                self.close()
                return
        del self._buffer[:at]

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        if not self.closed.done():
            self.closed.set_result(None)
        self._ended()
