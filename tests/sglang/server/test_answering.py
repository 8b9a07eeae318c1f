"""Chat answers that bring their records: what is completed on its way out, and what is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import msgspec
import pytest
from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from leyline_engine.contract import (
    RECORD_MEMBER,
    EditPayload,
    Receipt,
    TurnRecord,
    edit_envelope,
)
from leyline_engine.records.turn_records import RecordBook
from leyline_engine.server.answering import CHAT_PATH, AnsweringWithRecords, note_envelope

PAYLOAD = EditPayload(session="s", scope="t", turn="t1")
ASKS = msgspec.to_builtins(edit_envelope("m", PAYLOAD, receipt_in_answer=True))
PART = TurnRecord(receipt=Receipt(message_id="m"), instance="run")
WHOLE = msgspec.structs.replace(PART, finished=True, output_ids=(1, 2))
ADDED = b',"%b":%b' % (RECORD_MEMBER.encode(), msgspec.json.encode(WHOLE))
TOKEN = b'data: {"choices":[{"finish_reason":null}]}\n\n'
LAST = b'data: {"choices":[{"finish_reason":"stop"}]}\n\n'
ENDS = b"data: [DONE]\n\n"
BODY = b'{"choices":[{"finish_reason":"stop"}]}'

Serve = Callable[[Request], Any]


def whole(body: bytes = BODY, **options: Any) -> Response:
    return Response(body, media_type="application/json", **options)


def stream(*parts: bytes) -> StreamingResponse:
    async def events() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    return StreamingResponse(events(), media_type="text/event-stream")


async def answered(
    response: Response,
    *,
    path: str = CHAT_PATH,
    envelope: object = ASKS,
    records: RecordBook | None = None,
) -> tuple[httpx.Response, list[bytes]]:
    """An answer, and its parts as they were sent."""
    book = records or book_of(WHOLE)
    sent: list[bytes] = []

    async def serve(_: Request) -> Response:
        note_envelope(envelope)
        return response

    async def between(request: Request, call_next: Any) -> Response:
        found: Response = await call_next(request)  # in a task of its own, as SGLang's
        return found

    inner = Starlette(routes=[Route(path, serve) for path in (CHAT_PATH, "/v1/completions")])
    inner.add_middleware(BaseHTTPMiddleware, dispatch=between)
    app = AnsweringWithRecords(inner, book)

    async def watched(scope: Any, receive: Any, send: Any) -> None:
        async def noting(message: Any) -> None:
            sent.append(message.get("body", b""))
            await send(message)

        await app(scope, receive, noting)

    transport = httpx.ASGITransport(watched)
    async with httpx.AsyncClient(transport=transport, base_url="http://e") as client:
        return await client.get(path), [part for part in sent if part]


def book_of(*records: TurnRecord) -> RecordBook:
    book = RecordBook(instance="run")
    for record in records:
        book.put(record)
    return book


async def test_a_body_brings_its_record_and_its_length() -> None:
    """All other bytes are as they were."""
    answer, _ = await answered(whole())
    assert answer.content == BODY[:-1] + ADDED + b"}"
    assert answer.headers["content-length"] == str(len(answer.content))


async def test_a_stream_brings_it_once_and_each_chunk_as_it_comes() -> None:
    """It is in the first chunk that finishes; the others aren't touched or held."""
    answer, parts = await answered(stream(TOKEN, LAST, LAST, ENDS))
    assert parts == [TOKEN, LAST.removesuffix(b"}\n\n") + ADDED + b"}\n\n", LAST, ENDS]
    assert "content-length" not in answer.headers


LEFT = {
    "refused": (whole(status_code=503), ASKS, book_of(WHOLE)),
    "no envelope": (whole(), None, book_of(WHOLE)),
    "an older proxy": (whole(), msgspec.to_builtins(edit_envelope("m", PAYLOAD)), book_of(WHOLE)),
    "no record": (whole(), ASKS, book_of()),
    "never finished": (whole(), ASKS, book_of(PART)),
    "a list": (whole(b'[{"finish_reason":"stop"}]'), ASKS, book_of(WHOLE)),
    "a list in an event": (stream(b'data: ["finish_reason":"stop"]\n\n'), ASKS, book_of(WHOLE)),
    "no object": (Response(b"<p>", media_type="text/html"), ASKS, book_of(WHOLE)),
    "two events": (stream(TOKEN + LAST, ENDS), ASKS, book_of(WHOLE)),
    "no event": (stream(b': "finish_reason":"\n\n'), ASKS, book_of(WHOLE)),
    "cut off": (stream(LAST[:-1]), ASKS, book_of(WHOLE)),
}


@pytest.mark.parametrize(("response", "envelope", "records"), LEFT.values(), ids=LEFT)
async def test_whatever_cannot_be_completed_is_left_as_it_is(
    response: Response, envelope: object, records: RecordBook
) -> None:
    """The proxy asks for the record then, as before."""
    async with asyncio.timeout(5):
        answer, _ = await answered(response, envelope=envelope, records=records)
    assert RECORD_MEMBER.encode() not in answer.content
    assert answer.status_code == response.status_code and answer.content


async def test_only_chat_answers_bring_records() -> None:
    """An envelope on another route is ignored, and isn't the next chat request's."""
    other, _ = await answered(whole(), path="/v1/completions")
    chat, _ = await answered(whole(), envelope=None)
    assert (other.content, chat.content) == (BODY, BODY)


async def test_a_body_in_parts_is_left_as_it_is() -> None:
    """It isn't held until its last part is there."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        note_envelope(ASKS)
        length = b"%d" % len(BODY)
        headers = [(b"content-type", b"application/json"), (b"content-length", length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for part, more in ((BODY[:-2], True), (BODY[-2:], False)):
            await send({"type": "http.response.body", "body": part, "more_body": more})

    transport = httpx.ASGITransport(AnsweringWithRecords(app, book_of(WHOLE)))
    async with httpx.AsyncClient(transport=transport, base_url="http://e") as client:
        assert (await client.get(CHAT_PATH)).content == BODY


async def test_a_record_that_is_on_its_way_is_waited_for_a_moment() -> None:
    """Its last message may be overtaken by the last token."""
    looks = 0

    class Book(RecordBook):
        def get(self, message_id: str) -> TurnRecord | None:
            nonlocal looks
            looks += 1
            return (None, PART, PART, WHOLE)[looks - 1]

    answer, _ = await answered(whole(), records=Book())
    assert ADDED in answer.content


async def test_answers_at_the_same_time_bring_each_their_own() -> None:
    """A request's envelope asks for its own record and no other's."""
    book = RecordBook(instance="run")

    async def serve(request: Request) -> Response:
        name = request.query_params["name"]
        note_envelope(msgspec.to_builtins(edit_envelope(name, PAYLOAD, receipt_in_answer=True)))
        await asyncio.sleep(0.01)
        book.put(msgspec.structs.replace(WHOLE, receipt=Receipt(message_id=name)))
        return whole(b'{"name":"%b"}' % name.encode())

    app = AnsweringWithRecords(Starlette(routes=[Route(CHAT_PATH, serve)]), book)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://e") as client:
        names = [f"m{number}" for number in range(8)]
        found = await asyncio.gather(*(client.get(f"{CHAT_PATH}?name={name}") for name in names))
    for name, answer in zip(names, found, strict=True):
        assert answer.json()["name"] == name
        assert answer.json()[RECORD_MEMBER]["receipt"]["message_id"] == name
