"""Read request bodies within a limit, and detect that the client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Iterable
from typing import Any, TypeVar

import anyio.to_thread
from starlette.requests import Request
from starlette.types import Receive

from ..errors import (
    BadRequestError,
    BodyTooLargeError,
    ClientDisconnected,
    MediaTypeError,
    RequestTimeoutError,
    UpstreamTimeoutError,
)
from ..request.surrogates import repair_surrogates
from ..request.values import MAX_VALUES, check_values
from ..unpackers import UNPACKERS, PackedError, Unpacker, encodings_of
from .signs import Signs

T = TypeVar("T")

_LARGE = 1 << 17
"""Bytes of a body from which reading it takes longer than others should wait."""

SHORTER = "Send fewer or shorter messages, or raise max_body_bytes."


async def within(limit_s: float | None, work: Coroutine[Any, Any, T], *, spent_s: float = 0) -> T:
    """Return the result of ``work``; cancel it if it takes longer than ``limit_s``.

    Args:
        spent_s: time that other work on the same answer took.

    Raises:
        UpstreamTimeoutError: it took longer.
    """
    try:
        async with asyncio.timeout(limit_s and max(0.0, limit_s - spent_s)):
            return await work
    except TimeoutError as error:
        raise UpstreamTimeoutError(
            f"The whole answer took longer than {limit_s} s.", code="upstream_total"
        ) from error


class EncodingError(MediaTypeError):
    """The request body has a content encoding that isn't read, or several.

    Args:
        accepted: names of those that are.
    """

    code = "unsupported_content_encoding"

    def __init__(self, accepted: Iterable[str]) -> None:
        names = ", ".join(accepted)
        super().__init__(
            f"The body may have one content encoding, of {names}, or none. Send it in one of "
            "these, or unpacked.",
            param="content-encoding",
        )
        self.header = ("accept-encoding", names)


async def read_body(
    request: Request,
    limit: int,
    way_out: str = SHORTER,
    *,
    timeout_s: float,
    values: int | None = MAX_VALUES,
) -> bytes:
    """Return the whole body, unpacked, at most ``limit`` bytes; of JSON, see :func:`checked_json`.

    Args:
        way_out: advice to the caller about a longer body.
        timeout_s: time limit for the whole body.
        values: most JSON values in it; None if it may be no JSON.

    Raises:
        EncodingError: the body has a content encoding that isn't read.
        BodyTooLargeError: the announced or the received length exceeds the limit, packed or not.
        RequestTimeoutError: the body didn't arrive in time.
        BadRequestError: it isn't in the encoding that it claims, or has too many values.
        ClientDisconnected: the client left before its body was complete.
    """
    encoding = _encoding_of(request)
    unpacker = UNPACKERS[encoding]() if encoding is not None else None
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit:
        raise too_large(limit, way_out)
    try:
        async with asyncio.timeout(timeout_s):
            raw = await _read(request, unpacker, limit, way_out)
    except TimeoutError as error:
        raise too_slow(timeout_s) from error
    except PackedError as error:
        raise BadRequestError(
            f"The request body can't be read as {encoding}: it {error}.",
            param="content-encoding",
            code="invalid_content_encoding",
        ) from error
    return raw if values is None else await checked_json(raw, values)


def _encoding_of(request: Request) -> str | None:
    """Return the content encoding of a body; None without one."""
    encodings = encodings_of(",".join(request.headers.getlist("content-encoding")))
    if len(encodings) > 1 or not UNPACKERS.keys() >= {*encodings}:
        raise EncodingError(UNPACKERS)
    return encodings[0] if encodings else None


async def checked_json(raw: bytes, most: int) -> bytes:
    """Return JSON with texts in which no surrogate is alone.

    Raises:
        BadRequestError: it has more than ``most`` values.
    """
    await in_steps(check_values(raw, most))
    return await in_steps(repair_surrogates(raw))


async def in_steps(work: Generator[None, None, T]) -> T:
    """Do work to its end, with other requests served after each step, and return its result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result
        await asyncio.sleep(0)


async def _read(request: Request, unpacker: Unpacker | None, limit: int, way_out: str) -> bytes:
    chunks: list[bytes] = []
    came = size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        chunk = message.get("body", b"")
        came += len(chunk)
        if came > limit:
            raise too_large(limit, way_out)
        for piece in (chunk,) if unpacker is None else unpacker.pieces(chunk):
            size += len(piece)
            if size > limit:
                raise too_large(limit, way_out)
            chunks.append(piece)
            if unpacker is not None:
                await asyncio.sleep(0)
        if not message.get("more_body", False):
            if unpacker is not None:
                unpacker.end()
            return b"".join(chunks)


async def beside(raw: bytes, work: Callable[[], T]) -> T:
    """Return the result of work on a body; done beside the event loop if it is large."""
    return work() if len(raw) <= _LARGE else await anyio.to_thread.run_sync(work)


async def until_disconnect(
    receive: Receive, work: Coroutine[Any, Any, T], signs: Signs | None = None
) -> T:
    """Return the result of ``work``; cancel it if the client disconnects first.

    Args:
        signs: given meanwhile, if the work doesn't send anything itself.

    Raises:
        ClientDisconnected: the client disconnected; ``work`` has ended.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        while not (task.done() or watcher.done()):
            wait_s = signs.wait_s if signs is not None else None
            await asyncio.wait((task, watcher), timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            if signs is not None and not (task.done() or watcher.done()):
                await signs.give()
        if task.done():
            return task.result()
        raise ClientDisconnected
    finally:
        for pending in (task, watcher):
            pending.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def too_large(limit: int, way_out: str = SHORTER) -> BodyTooLargeError:
    """Return the error for a body of more than ``limit`` bytes."""
    return BodyTooLargeError(
        f"The request body is larger than this proxy's limit of {limit} bytes. {way_out}"
    )


def too_slow(timeout_s: float) -> RequestTimeoutError:
    """Return the error for a body that took longer than ``timeout_s``."""
    return RequestTimeoutError(
        f"The request body didn't arrive within {timeout_s:g} s (body_timeout_s)."
    )
