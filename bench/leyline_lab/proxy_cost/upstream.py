"""An engine that does no work: it answers chat completions from canned bytes, as fast as it can.

It looks like an engine with Leyline's plugin, so that a proxy in front of it identifies, compares,
renders and accounts as in production. Run with a document and a port as arguments. Below
``/asked`` it looks like one whose answers don't bring their records.

Two members of a request choose its answer: ``max_tokens`` the number of chunks in a stream,
``seed`` one of the canned answers. Other proxies pass both on.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import uvloop

from leyline_engine.contract import (
    CAPABILITY_PATH,
    RECEIPT_ACTION,
    RECORD_MEMBER,
    RENDERER_PATH,
    Capability,
    Receipt,
    TokenCounts,
    TurnRecord,
    with_receipts_in_answers,
)
from leyline_proxy.render import ChatRenderer

MODEL = "bench"
RECORDS = 4096
"""Number of records kept for proxies that ask."""

_LENGTH = re.compile(rb"content-length:\s*(\d+)", re.IGNORECASE)
_NUMBER = re.compile(rb"\s*(\d+)")
_ID = re.compile(rb'"message_id":"([^"]+)"')
_TAIL = 1 << 16
"""Length of a body's end that holds its envelope, in bytes."""
COUNTED = "/requests"
"""Path that returns the number of requests."""
ASKED = "/asked"
"""Prefix of paths on which the engine is one that is asked for its records."""
_ASKS = b'"%b"' % RECEIPT_ACTION.encode()


class Canned:
    """All answers, made before the first request.

    Args:
        document: ``renderer`` is an engine's renderer document; ``answers`` are the assistant's
            messages, each with the tokens that it is in a prompt.
    """

    def __init__(self, document: dict[str, Any]) -> None:
        self.renderer = ChatRenderer(**document["renderer"])
        self.documents = {
            "/v1/models": {"object": "list", "data": [{"id": MODEL, "object": "model"}]},
            CAPABILITY_PATH: msgspec.to_builtins(with_receipts_in_answers(_capability())),
            ASKED + CAPABILITY_PATH: msgspec.to_builtins(_capability()),
            RENDERER_PATH: document["renderer"],
        }
        self.answers = [_answer(each["message"]) for each in document["answers"]]
        self.records = [_record(each["tokens"]) for each in document["answers"]]
        self.streams: dict[tuple[int, int], list[bytes]] = {}
        self._messages = [each["message"] for each in document["answers"]]

    def whole(self, answer: int, asks: bytes | None) -> bytes:
        """Return a whole answer, head and body, with the record of the message that asks for it."""
        body = self._completed(self.answers[answer], answer, asks)
        return _head("application/json", f"content-length: {len(body)}") + body

    def stream(self, answer: int, count: int, asks: bytes | None) -> list[bytes]:
        """Return the framed events of a stream with ``count`` chunks of text, and such a record."""
        key = (answer, count)
        if key not in self.streams:
            self.streams[key] = [_framed_event(e) for e in _events(self._messages[answer], count)]
        last = self._completed(_FINISH, answer, asks)
        return [*self.streams[key], _framed_event(last), _FRAMED_END]

    def _completed(self, document: bytes, answer: int, asks: bytes | None) -> bytes:
        if asks is None:
            return document
        before, after = self.records[answer]
        member = b',"%b":' % RECORD_MEMBER.encode()
        return b"".join((document[:-1], member, before, asks, after, b"}"))


def _capability() -> Capability:
    return Capability(
        engine="bench",
        engine_version="1",
        model=MODEL,
        model_fingerprint="b" * 16,
        architecture="None",
        vocab_size=8192,
        max_context=262_144,
        splices=True,
        actions=("leyline.edit@1.0",),
        instance="1",
    )


def _answer(message: dict[str, Any]) -> bytes:
    document = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
        "usage": {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12},
    }
    return json.dumps(document).encode()


def _record(output: list[int]) -> tuple[bytes, bytes]:
    """Return a turn's record before its id, and after it."""
    counts = TokenCounts(prompt=10, prefix=4, prefilled=6)
    receipt = Receipt(message_id="@", tokens=counts)
    record = TurnRecord(receipt=receipt, finished=True, output_ids=tuple(output))
    before, _, after = msgspec.json.encode(record).partition(b"@")
    return before, after


def _chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
    document = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": MODEL,
        "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}],
    }
    return json.dumps(document).encode()


def _events(message: dict[str, Any], count: int) -> Iterator[bytes]:
    """Yield all chunks of a stream but the one that finishes."""
    yield _chunk({"role": "assistant", "content": ""})
    for number in range(count):  # some proxies take a text that stays the same for an endless loop
        yield _chunk({"content": f" token {number}"})
    calls = [{"index": at, **call} for at, call in enumerate(message["tool_calls"])]
    yield _chunk({"tool_calls": calls})


def _framed_event(document: bytes) -> bytes:
    return _framed(b"data: " + document + b"\n\n")


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _head(kind: str, framing: str, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\n{framing}\r\n\r\n".encode()


_FINISH = _chunk({}, "tool_calls")
_FRAMED_END = _framed(b"data: [DONE]\n\n") + b"0\r\n\r\n"
_STREAM_HEAD = _head("text/event-stream; charset=utf-8", "transfer-encoding: chunked")


class Server:
    """The state that connections share.

    Args:
        pause_s: seconds between the chunks of a stream; at 0 each follows on the last.
    """

    def __init__(self, canned: Canned) -> None:
        self.canned = canned
        self.pause_s = 0.0
        self.asked: OrderedDict[bytes, int] = OrderedDict()
        """Answers by message id."""
        self.requests = 0

    def note(self, body: bytes, answer: int) -> bytes | None:
        """Remember which answer a proxy's request got.

        Returns its message id, if it asks for its record in the answer.
        """
        found = _ID.search(body, max(0, len(body) - _TAIL)) or _ID.search(body)
        if found is None:
            return None
        if body.find(_ASKS, found.end()) >= 0:
            return found[1]
        self.asked[found[1]] = answer
        if len(self.asked) > RECORDS:
            self.asked.popitem(last=False)
        return None


class Connection(asyncio.Protocol):
    """One connection; requests on it come one after the other."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._received = bytearray()
        self._head_end = self._end = 0
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.Handle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport of a new client."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, _: Exception | None) -> None:
        """Note that the client has gone."""
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Take a part of a request."""
        self._received += data
        if not self._end:
            split = self._received.find(b"\r\n\r\n")
            if split < 0:
                return
            length = _LENGTH.search(self._received, 0, split)
            self._head_end = split + 4
            self._end = self._head_end + (int(length[1]) if length is not None else 0)
        if len(self._received) >= self._end:
            line = bytes(self._received[: self._received.index(b"\r\n")])
            body = bytes(self._received[self._head_end : self._end])
            self._received.clear()
            self._end = 0
            self._serve(line.split(b" ")[1].decode(), body)

    def _serve(self, path: str, body: bytes) -> None:
        canned = self._server.canned
        if path not in canned.documents:
            path = path.removeprefix(ASKED)
        self._server.requests += path != COUNTED
        if path == "/v1/chat/completions":
            self._complete(body)
        elif path.startswith("/leyline/receipts/"):
            identifier = path.rpartition("/")[2].encode()
            answer = self._server.asked.pop(identifier, None)
            before, after = canned.records[answer or 0]
            self._document(before + identifier + after, found=answer is not None)
        elif path == "/tokenize":
            asked = json.loads(body)
            tokens = canned.renderer.render_request(asked["messages"], asked).tokens.tolist()
            self._document(json.dumps({"tokens": tokens}).encode())
        elif path == COUNTED:
            self._document(b"%d" % self._server.requests)
        elif path.startswith("/pause/"):
            self._server.pause_s = int(path.rpartition("/")[2]) / 1e6
            self._document(b"{}")
        else:
            document = canned.documents.get(path)
            self._document(json.dumps(document).encode(), found=document is not None)

    def _complete(self, body: bytes) -> None:
        canned = self._server.canned
        answer = (_number(body, b'"seed":') or 0) % len(canned.answers)
        asks = self._server.note(body, answer)
        if b'"stream":true' in body or b'"stream": true' in body:
            self._write(_STREAM_HEAD)
            events = canned.stream(answer, _number(body, b'"max_tokens":') or 0, asks)
            self._next(iter(events))
        else:
            self._write(canned.whole(answer, asks))

    def _next(self, events: Iterator[bytes]) -> None:
        event = next(events, None)
        if event is None or self._transport is None:
            return
        self._write(event)
        pause = self._server.pause_s
        if pause:
            self._timer = self._loop.call_later(pause, self._next, events)
        else:
            self._timer = self._loop.call_soon(self._next, events)

    def _document(self, body: bytes, *, found: bool = True) -> None:
        status = "200 OK" if found else "404 Not Found"
        self._write(_head("application/json", f"content-length: {len(body)}", status) + body)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


def _number(body: bytes, name: bytes) -> int | None:
    place = body.rfind(name)
    found = _NUMBER.match(body, place + len(name)) if place >= 0 else None
    return int(found[1]) if found is not None else None


async def main(canned: Canned, port: int) -> None:
    """Serve until killed."""
    server = Server(canned)
    loop = asyncio.get_running_loop()
    listening = await loop.create_server(lambda: Connection(server), "127.0.0.1", port)
    await listening.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(Canned(json.loads(Path(sys.argv[1]).read_text())), int(sys.argv[2])))
