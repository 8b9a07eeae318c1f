"""Bodies of servers' answers, read whole and no further than a limit, packed or not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx

from .unpackers import UNPACKERS, PackedError, encodings_of

_PACKED = frozenset({"gzip", "deflate"})


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
    encodings = encodings_of(response.headers.get("content-encoding", ""))
    if not encodings:
        async for part in response.aiter_raw():
            yield part
        return
    if len(encodings) > 1 or encodings[0] not in _PACKED:
        raise httpx.DecodingError("the body is packed, in a way that nobody asked for")
    unpacker = UNPACKERS[encodings[0]]()
    try:
        async for packed in response.aiter_raw():
            for part in unpacker.pieces(packed):
                yield part
                await asyncio.sleep(0)
        unpacker.end()
    except PackedError as error:
        raise httpx.DecodingError(f"the packed body {error}") from error
