"""The outer form: a magic number, the version, and a compressed record.

::

    "LYS" │ version, 1 byte │ zstd frame with checksum over a MessagePack record

Bytes of another version, or that were damaged, are no session: whoever finds them has a miss, and
the conversation goes on as an ordinary prefill.
"""

from __future__ import annotations

import msgspec
import zstandard

from ...model.session import Session
from .reader import SessionReader
from .records import StoredSession
from .writer import SessionWriter

FORMAT = 3
"""Written into every session; another is a miss. Change it with any change of :mod:`.records`, or
of what they hold."""

UNENCODABLE = (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError)
"""Errors of :func:`encode_session`."""

_HEAD = b"LYS" + bytes([FORMAT])
_LEVEL = 3
_MAX_RECORD = 1 << 30
"""Bytes of an unpacked record that are read at most."""


def encode_session(session: Session) -> bytes:
    """The session as bytes, but for the turns in flight: a store knows of those itself.

    Raises:
        UNENCODABLE: it holds what no request could bring.
    """
    record = msgspec.msgpack.encode(SessionWriter().write(session))
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
    return _HEAD + compressor.compress(record)


def decode_session(data: bytes) -> Session | None:
    """The session again; None where the bytes are of another version or damaged."""
    if not data.startswith(_HEAD):
        return None
    frame = memoryview(data)[len(_HEAD) :]
    try:
        if not 0 <= zstandard.frame_content_size(frame) <= _MAX_RECORD:
            return None
        record = zstandard.ZstdDecompressor().decompress(frame)
        stored = msgspec.msgpack.decode(record, type=StoredSession)
        return SessionReader(stored).read()
    except (zstandard.ZstdError, LookupError, MemoryError, *UNENCODABLE):
        return None
