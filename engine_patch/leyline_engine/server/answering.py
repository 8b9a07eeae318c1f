"""Chat answers that bring their records, on an engine's own HTTP application.

SGLang and vLLM show nothing of a request's receipt in a stream, and their schedulers' receipts come
to this process anyway, before the last tokens do. So answers are completed on their way out, as
bytes: for a whole answer the body, for a stream the first chunk with a finish reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from leyline_engine.contract import TurnRecord, message_that_asks, with_record
from leyline_engine.records.turn_records import RecordBook

CHAT_PATH = "/v1/chat/completions"

_WAITS_S = (0.0, 0.001, 0.002, 0.005, 0.01)
"""Pauses before each look for a record that may still be on its way, in seconds."""

_FINISHES = b'"finish_reason":"'
_EVENT, _END = b"data: ", b"\n\n"


@dataclass
class _Asked:
    """The request for a record in one HTTP request's envelope."""

    message_id: str | None = None


_asked: ContextVar[_Asked | None] = ContextVar("leyline_asked", default=None)


def note_envelope(raw: object) -> None:
    """Note that the request that is being served has brought an envelope."""
    asked = _asked.get()
    if asked is not None:
        asked.message_id = message_that_asks(raw) or asked.message_id


class AnsweringWithRecords:
    """ASGI middleware: chat answers bring their records, if their envelopes ask for them.

    Args:
        records: records from the schedulers.
    """

    def __init__(self, app: ASGIApp, records: RecordBook) -> None:
        self._app = app
        self._records = records

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, as ASGI."""
        if scope["type"] != "http" or scope["path"] != CHAT_PATH:
            await self._app(scope, receive, send)
            return
        with _noting() as asked:
            await self._app(scope, receive, _Answer(asked, self._records, send).send)


@contextmanager
def _noting() -> Iterator[_Asked]:
    """Note envelopes within it, also those of tasks, which get the context as a copy."""
    asked = _Asked()
    token = _asked.set(asked)
    try:
        yield asked
    finally:
        _asked.reset(token)


class _Answer:
    """One answer on its way out."""

    def __init__(self, asked: _Asked, records: RecordBook, send: Send) -> None:
        self._asked = asked
        self._records = records
        self._send = send
        self._start: Message | None = None
        """The start message, held until the body is known, as it gives the body's length."""
        self._streams = False

    async def send(self, message: Message) -> None:
        """Send a message in place of the server."""
        if message["type"] == "http.response.start":
            kind = _header(message, b"content-type") if message["status"] == 200 else b""
            self._streams = kind.startswith(b"text/event-stream")
            if kind.startswith(b"application/json"):
                self._start = message
                return
        elif message["type"] == "http.response.body":
            if self._start is not None:
                message = await self._whole(self._start, message)
            elif self._streams and _FINISHES in message.get("body", b""):
                self._streams = False
                message = await self._finish(message)
        await self._send(message)

    async def _whole(self, start: Message, message: Message) -> Message:
        """Return the body, to send after its start."""
        self._start = None
        body: bytes = message.get("body", b"")
        # If a middleware is in between, an empty part follows a whole body.
        if _header(start, b"content-length") == b"%d" % len(body):
            record = await self._record()
            if record is not None:
                message = {**message, "body": _completed(body, record)}
                start = _with_length(start, len(message["body"]))
        await self._send(start)
        return message

    async def _finish(self, message: Message) -> Message:
        """Return the chunk with a finish reason, completed."""
        body: bytes = message["body"]
        one = body.startswith(_EVENT) and body.endswith(_END) and body.count(_END) == 1
        record = await self._record() if one else None
        if record is None:
            return message
        data = _completed(body[len(_EVENT) : -len(_END)], record)
        return {**message, "body": _EVENT + data + _END}

    async def _record(self) -> TurnRecord | None:
        """Return the finished record; None if it wasn't requested, or doesn't come in time."""
        message_id = self._asked.message_id
        if message_id is None:
            return None
        for pause in _WAITS_S:
            await asyncio.sleep(pause)
            record = self._records.get(message_id)
            if record is not None and record.finished:
                return record
        return None


def _completed(answer: bytes, record: TurnRecord) -> bytes:
    try:
        return with_record(answer, record)
    except ValueError:
        return answer  # no proxy reads it


def _header(start: Message, wanted: bytes) -> bytes:
    found: bytes = next((value for name, value in start.get("headers", ()) if name == wanted), b"")
    return found


def _with_length(start: Message, length: int) -> Message:
    headers = [
        (name, b"%d" % length if name == b"content-length" else value)
        for name, value in start.get("headers", ())
    ]
    return {**start, "headers": headers}
