"""Unpackers of bodies in a content encoding. They work in pieces, so that a caller can count what
a body becomes, and stop, and let other work run in between."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import zstandard

_PIECE = 256 * 1024
"""Bytes of a piece."""
_ZLIB_PART = 64 * 1024
_ZSTD_PART = 128
"""Packed bytes that are unpacked at once. The library returns all that they become: four bytes
may be a block of 128 KiB, so that these are at most 4 MiB."""
_PARTS = 512
"""Parts after which a piece is due, even if they have become nothing."""
_WINDOW = 8 * 1024 * 1024
"""Most memory that a frame may demand: RFC 9659 allows no more over HTTP."""
_MEMBERS = 1024
"""Members of a gzip body, frames of a zstd body. Each costs time, even if it is empty."""


class PackedError(Exception):
    """A body isn't in the encoding that it claims, is damaged, or demands too much. The message
    holds nothing of it."""


class Unpacker(ABC):
    """Unpacks one body, which consists of members.

    Args:
        most: members of the body, at most.
    """

    part = _ZLIB_PART

    def __init__(self, most: int = _MEMBERS) -> None:
        self._left = most
        self._member: Any = None
        """The decompressor of the member under way; None between members."""

    def pieces(self, packed: bytes) -> Iterator[bytes]:
        """Yield what the next bytes of the body become, in pieces of at most some MiB. A piece may
        be empty: it is a chance to let other work run.

        Raises:
            PackedError: see there.
        """
        view = memoryview(packed)
        held: list[bytes] = []
        size = parts = 0
        for at in range(0, len(view), self.part):
            for piece in self._unpacked(view[at : at + self.part]):
                held.append(piece)
                size += len(piece)
                parts += 1
                if size >= _PIECE or parts >= _PARTS:
                    yield b"".join(held)
                    held.clear()
                    size = parts = 0
        yield b"".join(held)

    def end(self) -> None:
        """Take the end of the body.

        Raises:
            PackedError: it comes within a member.
        """
        if self._member is not None:
            raise PackedError("ends too early")

    def _unpacked(self, part: bytes | memoryview) -> Iterator[bytes]:
        while part:
            if self._member is None:
                if not self._left:
                    raise PackedError("continues after its end, or has too many members")
                self._left -= 1
                self._member = self._begin()
            try:
                part = yield from self._fed(part)
            except (zlib.error, zstandard.ZstdError) as error:
                raise PackedError(self._reason(error)) from None
            if self._member.eof:
                self._member = None

    @abstractmethod
    def _begin(self) -> Any:
        """Return the decompressor of a member."""

    @abstractmethod
    def _fed(self, part: bytes | memoryview) -> Generator[bytes, None, bytes]:
        """Yield what a part becomes, and return what comes after the member."""

    def _reason(self, error: Exception) -> str:
        return "is damaged"


class _Gzip(Unpacker):
    _wbits = zlib.MAX_WBITS | 16

    def _begin(self) -> Any:
        return zlib.decompressobj(self._wbits)

    def _fed(self, part: bytes | memoryview) -> Generator[bytes, None, bytes]:
        # Without more input, there may still be some of the output.
        piece = b" " * _PIECE
        while not self._member.eof and (part or len(piece) == _PIECE):
            piece = self._member.decompress(part, _PIECE)
            part = self._member.unconsumed_tail
            yield piece
        return bytes(self._member.unused_data)


class _Deflate(_Gzip):
    """Deflate with zlib's header, as it should be, or without."""

    def __init__(self) -> None:
        super().__init__(1)
        self._head: bytes | None = b""
        """The first bytes, until they show which one it is."""

    def pieces(self, packed: bytes) -> Iterator[bytes]:
        """Yield as :meth:`Unpacker.pieces`."""
        if self._head is not None:
            packed = self._head + packed
            if len(packed) < 2:
                self._head = packed
                return
            self._head = None
            headed = packed[0] & 15 == zlib.DEFLATED and int.from_bytes(packed[:2]) % 31 == 0
            self._wbits = zlib.MAX_WBITS if headed else -zlib.MAX_WBITS
        yield from super().pieces(packed)

    def end(self) -> None:
        """Take the end of the body, as :meth:`Unpacker.end`."""
        if self._head:
            raise PackedError("ends too early")
        super().end()


class _Zstd(Unpacker):
    part = _ZSTD_PART

    def __init__(self) -> None:
        super().__init__()
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW)

    def _begin(self) -> Any:
        return self._decompressor.decompressobj()

    def _fed(self, part: bytes | memoryview) -> Generator[bytes, None, bytes]:
        yield self._member.decompress(part)
        return bytes(self._member.unused_data)

    def _reason(self, error: Exception) -> str:
        if "too much memory" in str(error):
            return f"needs a window of more than {_WINDOW >> 20} MiB"
        if "ictionary" in str(error):
            return "needs a dictionary"
        return "is damaged"


UNPACKERS: Mapping[str, Callable[[], Unpacker]] = MappingProxyType(
    {"gzip": _Gzip, "zstd": _Zstd, "deflate": _Deflate}
)
"""Makers of unpackers, by the encoding's name."""
ALIASES: Mapping[str, str] = MappingProxyType({"x-gzip": "gzip"})
IDENTITY = frozenset({"", "identity"})


def encodings_of(header: str) -> list[str]:
    """Return the encodings that a ``Content-Encoding`` names, in order; none for identity."""
    named = [each.strip().lower() for each in header.split(",")]
    return [ALIASES.get(each, each) for each in named if each not in IDENTITY]
