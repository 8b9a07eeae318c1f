"""Bodies of servers' answers, read whole and no further than a limit, packed or not."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Iterator

import httpx

_PACKED = frozenset({"gzip", "x-gzip", "deflate"})
_PIECE = 1024 * 1024
"""Bytes unpacked at a time; other work of the event loop goes on in between."""


class BodyTooLongError(Exception):
    """A body is longer than its limit."""


async def bounded_body(response: httpx.Response, limit: int) -> bytes:
    """Return the whole body of an open response, or of one that was read before.

    httpx would unpack each part as a whole, through any number of encodings: a few kilobytes may
    become gigabytes before anybody counts them.

    Args:
        limit: bytes of the body, unpacked.

    Raises:
        BodyTooLongError: it is longer. No more than ``limit`` and a piece were kept.
        httpx.DecodingError: it isn't in the encoding that it claims, or in one that isn't read.
        httpx.TransportError: it broke off.
    """
    parts: list[bytes] = []
    size = 0
    async for part in _parts(response):
        size += len(part)
        if size > limit:
            raise BodyTooLongError
        parts.append(part)
    return b"".join(parts)


async def _parts(response: httpx.Response) -> AsyncIterator[bytes]:
    if response.is_stream_consumed:
        yield response.content
        return
    encoding = response.headers.get("content-encoding", "").strip().lower()
    if encoding in ("", "identity"):
        async for part in response.aiter_raw():
            yield part
        return
    if encoding not in _PACKED:
        raise httpx.DecodingError("the body is packed, in a way that nobody asked for")
    unpacker = _Unpacker()
    try:
        async for packed in response.aiter_raw():
            for part in unpacker.parts(packed):
                yield part
                await asyncio.sleep(0)
    except zlib.error as error:
        raise httpx.DecodingError(str(error)) from error
    if not unpacker.complete:
        raise httpx.DecodingError("the packed body ends too early")


class _Unpacker:
    """Unpacks gzip and deflate, with or without zlib's header."""

    def __init__(self) -> None:
        self._inner = zlib.decompressobj(zlib.MAX_WBITS | 32)
        self._begun = False

    @property
    def complete(self) -> bool:
        """True at the end of the packed body, or if there is none."""
        return self._inner.eof or not self._begun

    def parts(self, packed: bytes) -> Iterator[bytes]:
        """Return what a part becomes, in pieces."""
        while packed and not self._inner.eof:
            try:
                part = self._inner.decompress(packed, _PIECE)
            except zlib.error:
                if self._begun:
                    raise
                self._inner = zlib.decompressobj(-zlib.MAX_WBITS)
                part = self._inner.decompress(packed, _PIECE)
            self._begun = True
            yield part
            packed = self._inner.unconsumed_tail
