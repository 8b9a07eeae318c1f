"""The answer to one request: its run on the service, and its response."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from leyline_engine.contract import with_record as completed
from leyline_replay.generation import (
    ErrorEvent,
    Event,
    FinishEvent,
    FinishReason,
    Job,
    JobSpec,
    TextEvent,
)
from leyline_replay.http.errors import ApiError, to_api_error
from leyline_replay.http.responses import Shape, WholeShape
from leyline_replay.service import EngineService
from leyline_replay.text.sampling import SampledToken

log = logging.getLogger(__name__)
_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Delivery:
    """The form of the answer that the caller wants."""

    stream: bool
    include_usage: bool
    with_record: bool = False
    """True if the answer brings its record."""


async def run_request(
    service: EngineService, request: Request, spec: JobSpec, shape: Shape, delivery: Delivery
) -> Response:
    """Submit a job and answer it, whole or as server-sent events.

    The first event is awaited before the status line is sent, so that an error before the first
    token has a status of its own.

    Raises:
        ApiError: nothing could be answered.
    """
    job = service.submit(spec)
    watcher = asyncio.create_task(_cancel_when_gone(service, request, job))
    streaming = False
    try:
        first = await job.channel.get()
        flow = _Flow(service, job, watcher, first)
        if not delivery.stream or isinstance(first[0], ErrorEvent):
            return await _whole(flow, shape, with_record=delivery.with_record)
        stream = _stream(flow, shape, delivery)
        streaming = True
        return StreamingResponse(stream, media_type="text/event-stream", headers=_NO_CACHE)
    finally:
        if not streaming:
            watcher.cancel()
            service.cancel(job)


async def run_whole(
    service: EngineService, request: Request, spec: JobSpec, shape: WholeShape
) -> Response:
    """Submit a job and answer it in one object.

    Raises:
        ApiError: nothing could be answered.
    """
    job = service.submit(spec)
    watcher = asyncio.create_task(_cancel_when_gone(service, request, job))
    flow = _Flow(service, job, watcher, [])
    try:
        return await _whole(flow, shape, with_record=False)
    finally:
        flow.close()


_NO_CACHE = {"cache-control": "no-cache", "x-accel-buffering": "no"}


async def _cancel_when_gone(service: EngineService, request: Request, job: Job) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    service.cancel(job)


async def _whole(flow: _Flow, shape: WholeShape, *, with_record: bool) -> Response:
    texts: list[str] = []
    tokens: list[SampledToken] = []
    async for event in flow.events():
        match event:
            case TextEvent(text=text, tokens=fresh):
                texts.append(text)
                tokens.extend(fresh)
            case ErrorEvent(error=error):
                raise error
            case FinishEvent(reason=reason) if reason is not FinishReason.CANCELLED:
                answer = msgspec.json.encode(shape.whole("".join(texts), tokens, event))
                if with_record:
                    answer = completed(answer, event.record)
                return Response(answer, media_type="application/json")
            case _:
                break
    raise ApiError(499, "the client closed the connection", code="cancelled")


@dataclass(frozen=True, slots=True)
class _Flow:
    """A running job and the events read from it so far."""

    service: EngineService
    job: Job
    watcher: asyncio.Task[None]
    first: list[Event]

    async def events(self) -> AsyncIterator[Event]:
        """Yield the job's events; ends with its last one."""
        events = self.first
        while True:
            for event in events:
                yield event
                if not isinstance(event, TextEvent):
                    return
            events = await self.job.channel.get()

    def close(self) -> None:
        """Stop watching the client, and the job if it still runs."""
        self.watcher.cancel()
        self.service.cancel(self.job)


async def _stream(flow: _Flow, shape: Shape, delivery: Delivery) -> AsyncIterator[bytes]:
    try:
        opening = shape.opening()
        if opening is not None:
            yield _sse(opening)
        async for event in flow.events():
            match event:
                case TextEvent(text=text, tokens=tokens):
                    for chunk in shape.piece(text, tokens):
                        yield _sse(chunk)
                case ErrorEvent(error=error):
                    yield _sse(to_api_error(error).body())
                case FinishEvent(reason=FinishReason.CANCELLED):
                    pass
                case FinishEvent():
                    *before, last = map(msgspec.json.encode, shape.closing(event))
                    if delivery.with_record:
                        last = completed(last, event.record)
                    for encoded in (*before, last):
                        yield _framed(encoded)
                    if delivery.include_usage:
                        yield _sse(shape.usage_chunk(event))
                    yield _DONE
    finally:
        flow.close()


def _sse(chunk: Any) -> bytes:
    return _framed(msgspec.json.encode(chunk))


def _framed(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
