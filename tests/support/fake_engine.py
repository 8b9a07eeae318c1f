"""A scripted upstream for tests of the protocol: it remembers requests and answers by script.

It knows nothing of tokens; what is spliced is tested with the real engine.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from leyline_engine.contract import (
    Capability,
    ForgetCounts,
    Receipt,
    TokenCounts,
    TurnRecord,
    message_that_asks,
    with_record,
)
from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings
from leyline_proxy.telemetry.tracing import Tracing
from leyline_proxy.upstream.embedded import ASGIStreamTransport, lifespan_of

MODEL = "fake-model"
JSON = {"content-type": "application/json"}
RECEIPTS = "/leyline/receipts/"

_FINISHES = re.compile(rb'"finish_reason": ?"')

CAPABILITY = Capability(
    engine="fake",
    engine_version="1",
    model=MODEL,
    model_fingerprint="f" * 16,
    architecture="None",
    vocab_size=256,
    max_context=100_000,
    splices=True,
    actions=("leyline.edit@1.0",),
)


@dataclass
class Answer:
    """One scripted answer; ``chunks`` are sent as they are, each after ``pause_s``."""

    chunks: Sequence[bytes] = ()
    status: int = 200
    content_type: str = "application/json"
    pause_s: float = 0.0
    headers: dict[str, str] = field(default_factory=dict)
    breaks: bool = False
    """Fail after the last chunk."""
    hangs: bool = False
    """Send nothing more after the last chunk, until the client goes."""


def chat_json(text: str = "Hello.", **members: Any) -> Answer:
    """A whole chat completion."""
    document = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text},
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12},
        **members,
    }
    return Answer([json.dumps(document).encode()])


def chunk(delta: dict[str, Any], finish: str | None = None, **members: Any) -> bytes:
    """One event of a chat stream."""
    document = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": MODEL,
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
        **members,
    }
    return b"data: " + json.dumps(document).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def chat_stream(*parts: str, **options: Any) -> Answer:
    """A streamed chat completion."""
    opening = chunk({"role": "assistant", "content": ""})
    events = [opening, *(chunk({"content": part}) for part in parts), chunk({}, "stop"), DONE]
    return Answer(events, content_type="text/event-stream", **options)


LONG = "".join(f"line {number} of the listing\n" for number in range(60))
"""A tool result."""


class FakeEngine:
    """An ASGI application with the paths of an engine."""

    def __init__(self, *, capability: Capability | None = CAPABILITY) -> None:
        self.capability = capability
        self.models = [MODEL]
        self.owner = ""
        """Of the models."""
        self.answers: list[Answer] = []
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.raw_headers: list[list[tuple[bytes, bytes]]] = []
        self.disconnects = 0
        self.gives_receipts = True
        self.scripted: dict[str, Answer] = {}
        """By the beginnings of paths that are answered so, whatever is asked."""
        self.asked: list[str] = []
        """Message ids whose records were asked for."""
        self.receipt: Callable[[str], Receipt] = lambda message_id: Receipt(
            message_id=message_id, tokens=TokenCounts(prompt=10, prefix=4, prefilled=6)
        )
        self.known_messages: list[str] = []

    @property
    def sent(self) -> dict[str, Any]:
        """The last completion request, decoded."""
        document: dict[str, Any] = json.loads(self.bodies[-1])
        return document

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            raise NotImplementedError(scope["type"])
        path = scope["path"]
        if path.startswith(RECEIPTS):
            self.asked.append(path.removeprefix(RECEIPTS))
        script = next(
            (each for start, each in self.scripted.items() if path.startswith(start)), None
        )
        if script is not None:
            await self._answer(script, receive, send)
        elif path in ("/v1/chat/completions", "/v1/completions"):
            await self.complete(Request(scope, receive), receive, send)
        elif path == "/v1/models":
            data = [{"id": name, "object": "model", "owned_by": self.owner} for name in self.models]
            await _json(send, {"object": "list", "data": data})
        elif path == "/leyline/capability" and self.capability is not None:
            await _json(send, msgspec.to_builtins(self.capability))
        elif path.startswith(RECEIPTS) and self.gives_receipts:
            await self._record(path.rpartition("/")[2], send)
        else:
            await _json(send, {"error": {"message": "no"}}, 404)

    async def _record(self, message_id: str, send: Send) -> None:
        if message_id not in self.known_messages:
            await _json(send, {}, 404)
            return
        await _json(send, msgspec.to_builtins(self.record(message_id)))

    def record(self, message_id: str) -> TurnRecord:
        """The engine's record of a request."""
        return TurnRecord(receipt=self.receipt(message_id), finished=True, output_ids=(1, 2))

    def completed(self, part: bytes, message_id: str) -> bytes:
        """A whole answer, or events of which one ends it, with the record of the request."""
        found = _FINISHES.search(part)
        place = found.start() if found is not None else 0
        start = part.index(b"{", max(0, part.rfind(b"\n\n", 0, place)))
        end = part.rindex(b"}", 0, part.find(b"\n\n", place) % (len(part) + 1)) + 1
        return part[:start] + with_record(part[start:end], self.record(message_id)) + part[end:]

    async def complete(self, request: Request, receive: Receive, send: Send) -> None:
        """Remember a completion request and answer it."""
        self.bodies.append(await request.body())
        self.headers.append(dict(request.headers))
        self.raw_headers.append(list(request.headers.raw))
        hints = (self.sent.get("custom_params") or {}).get("kv_hints")
        if hints:
            self.known_messages.append(hints["message_id"])
        streamed = bool(self.sent.get("stream"))
        default = chat_stream("Hel", "lo.") if streamed else chat_json()
        answer = self.answers.pop(0) if self.answers else default
        if (asks := message_that_asks(hints)) is not None and self.gives_receipts:
            answer = self._with_record(answer, asks)
        await self._answer(answer, receive, send)

    def _with_record(self, answer: Answer, message_id: str) -> Answer:
        chunks = list(answer.chunks)
        ends = (at for at, part in enumerate(chunks) if _FINISHES.search(part))
        if (place := next(ends, None)) is not None:
            chunks[place] = self.completed(chunks[place], message_id)
        return replace(answer, chunks=chunks)

    async def _answer(self, answer: Answer, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(_wait_gone(receive))
        work = asyncio.ensure_future(self.send_answer(answer, send))
        try:
            await asyncio.wait((gone, work), return_when=asyncio.FIRST_COMPLETED)
            # A chunk that is sent as the client leaves fails, which may come first.
            unsent = work.done() and isinstance(work.exception(), OSError) and not answer.breaks
            if work.done() and not unsent:
                work.result()
            else:
                self.disconnects += 1
        finally:
            for task in (gone, work):
                task.cancel()
            await asyncio.gather(gone, work, return_exceptions=True)

    async def send_answer(self, answer: Answer, send: Send) -> None:
        """An answer, chunk by chunk."""
        headers = {"content-type": answer.content_type, **answer.headers}
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        if answer.hangs and not answer.chunks:
            await asyncio.Event().wait()
        await send({"type": "http.response.start", "status": answer.status, "headers": raw})
        for part in answer.chunks:
            await asyncio.sleep(answer.pause_s)
            await send({"type": "http.response.body", "body": part, "more_body": True})
        if answer.breaks:
            raise ConnectionError("scripted")
        if answer.hangs:
            await asyncio.Event().wait()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _wait_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _json(send: Send, document: Any, status: int = 200) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    body = json.dumps(document).encode()
    await send({"type": "http.response.body", "body": body, "more_body": False})


def forgotten(message_id: str) -> Receipt:
    """The receipt of a turn whose forget was met."""
    tokens = TokenCounts(prompt=1, prefilled=1)
    return Receipt(message_id=message_id, tokens=tokens, forgot=ForgetCounts(3, 0, 0))


@asynccontextmanager
async def proxy_before(
    engine: ASGIApp, *, tracing: Tracing | None = None, **settings: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a proxy before ``engine``; bodies that a test writes by hand are JSON."""
    given = Settings(handshake_retry_s=0.05, **settings)
    app = create_app(given, engine_app=engine, tracing=tracing)
    transport = ASGIStreamTransport(app)
    async with (
        lifespan_of(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=JSON) as http,
    ):
        yield http


def tool_session(turns: int) -> list[dict[str, Any]]:
    """An agent's history with a long result per turn."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "List the folders."}]
    for turn in range(turns):
        function = {"name": "ls", "arguments": json.dumps({"path": str(turn)})}
        call = {"id": f"c{turn}", "type": "function", "function": function}
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{turn}", "content": f"{turn}\n{LONG}"},
        ]
    return messages
