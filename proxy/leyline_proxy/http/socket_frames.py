"""Heads of WebSocket frames (RFC 6455, section 5.2), read before their payloads. Pure."""

from __future__ import annotations

from dataclasses import dataclass

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
