"""The SDK client of a replay, against a scripted service on a loopback port."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from leyline_lab.errors import AccountError, RequestRefusedError, StackError
from leyline_lab.replay.driver import ChatDriver
from leyline_lab.traces.recordings import TraceRequest

TOKENS = {"prompt": 100, "prefix": 60, "spliced": 20, "reused": 10, "prefilled": 10, "freed": 0}
RECEIPT: dict[str, Any] = {"outcome": "spliced", "reason": "spliced", "tokens": TOKENS}
REQUEST = TraceRequest(
    ({"role": "user", "content": "hi"},), ({"type": "function", "function": {"name": "f"}},)
)
PREFILL_S = 0.05


@dataclass
class Service:
    """A chat service that answers by script and keeps its requests."""

    receipt: dict[str, Any] | None = None
    status: int = 200
    sent: list[tuple[dict[str, Any], str | None]] = field(default_factory=list)

    async def models(self, _: Request) -> Response:
        """The one model."""
        return JSONResponse({"object": "list", "data": [{"id": "tiny", "object": "model"}]})

    async def chat(self, request: Request) -> Response:
        """A stream: the role at once, a token after a while, the finish with the receipt."""
        self.sent.append((await request.json(), request.headers.get("x-leyline-session")))
        if self.status != 200:
            error = {"message": "the prompt is too long", "code": "context_length_exceeded"}
            return JSONResponse({"error": error}, self.status)
        return StreamingResponse(self._events(), media_type="text/event-stream")

    async def _events(self) -> AsyncIterator[bytes]:
        yield _event({"role": "assistant", "content": ""}, None)
        await asyncio.sleep(PREFILL_S)
        yield _event({"content": "x"}, None)
        extra = {"leyline": self.receipt} if self.receipt is not None else {}
        yield _event({}, "length", **extra)
        yield b"data: [DONE]\n\n"


def _event(delta: dict[str, Any], finish: str | None, **extra: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "tiny"}
    return b"data: " + json.dumps({**chunk, "choices": [choice], **extra}).encode() + b"\n\n"


@pytest.fixture
def service() -> Service:
    """The answer of the scripted service."""
    return Service(receipt=RECEIPT)


@pytest.fixture
def base_url(service: Service) -> Iterator[str]:
    """The service on a free port."""
    routes = [
        Route("/v1/models", service.models),
        Route("/v1/chat/completions", service.chat, methods=["POST"]),
    ]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), log_config=None))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        server.should_exit = True
        thread.join(10)


@pytest.fixture
def driver(base_url: str) -> Iterator[ChatDriver]:
    """A client of the service."""
    made = ChatDriver(base_url)
    yield made
    made.close()


def test_a_request_is_sent_as_recorded(driver: ChatDriver, service: Service) -> None:
    """Messages and tools go out untouched, one token is asked for, the session is named."""
    driver.send(REQUEST, session="s-1", place=(0, 0))
    body, session = service.sent[0]
    assert session == "s-1"
    assert body == {
        "model": "tiny",
        "messages": list(REQUEST.messages),
        "tools": list(REQUEST.tools),
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 1,
        "temperature": 0,
    }


def test_the_receipt_becomes_the_result(driver: ChatDriver) -> None:
    """Tokens and reason come from the finish chunk; the opening chunk is no first token."""
    result = driver.send(REQUEST, session="s", place=(2, 5))
    assert (result.session, result.turn, result.reason) == (2, 5, "spliced")
    assert (result.prompt, result.cached, result.spliced) == (100, 60, 20)
    assert (result.reused, result.prefilled) == (10, 10)
    assert result.ttft_ms is not None and result.ttft_ms >= PREFILL_S * 1000


def test_a_policy_may_travel_with_the_request(base_url: str, service: Service) -> None:
    """The policy goes into the body's own field; without tools, none are sent."""
    driver = ChatDriver(base_url, model="tiny", policy="keep_all")
    driver.send(TraceRequest(REQUEST.messages), session="s", place=(0, 0))
    driver.close()
    assert service.sent[0][0]["leyline"] == {"policy": "keep_all"}
    assert "tools" not in service.sent[0][0]


@pytest.mark.parametrize(
    ("receipt", "message"),
    [
        (None, "is this address a Leyline proxy"),
        ({"outcome": "spliced"}, "counts no tokens"),
        ({"tokens": TOKENS | {"spliced": 21}}, "21 spliced \\+ 10 reused \\+ 10 prefilled"),
        ({"tokens": TOKENS | {"reused": 9}}, "20 spliced \\+ 9 reused \\+ 10 prefilled"),
    ],
)
def test_an_account_that_does_not_add_up(
    driver: ChatDriver, service: Service, receipt: dict[str, Any] | None, message: str
) -> None:
    """A missing, empty or contradictory receipt stops the replay."""
    service.receipt = receipt
    with pytest.raises(AccountError, match=message):
        driver.send(REQUEST, session="s", place=(0, 0))


def test_refusals_and_failures_are_told_apart(driver: ChatDriver, service: Service) -> None:
    """A 4xx ends a session only; a 5xx is the stack's failure. Neither is tried again."""
    service.status = 400
    with pytest.raises(RequestRefusedError, match="HTTP 400: the prompt is too long"):
        driver.send(REQUEST, session="s", place=(0, 0))
    service.status = 503
    with pytest.raises(StackError, match="request 1 of session 1: HTTP 503"):
        driver.send(REQUEST, session="s", place=(0, 0))
    assert len(service.sent) == 2


def test_no_service_no_driver() -> None:
    """An address where nothing listens is named."""
    with pytest.raises(StackError, match="no OpenAI-compatible service at http"):
        ChatDriver("http://127.0.0.1:9/v1")
