"""A prompt that is too long, on each API: the error on which its clients compact."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from support.fake_engine import MODEL, Answer, FakeEngine, chunk, proxy_before
from support.messages_route import events
from support.overflow_words import ANTHROPIC_CLIENTS, ENGINES, OPENAI_CLIENTS, Words
from support.sockets import socket_proxy

SSE = "text/event-stream"
CODE = "context_length_exceeded"
TALK = [{"role": "user", "content": "Hello."}]
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TALK},
    "/v1/completions": {"prompt": "Hello."},
    "/v1/responses": {"input": "Hello."},
    "/v1/messages": {"messages": TALK, "max_tokens": 9},
}
SGLANG = "The input (5000 tokens) is longer than the model's context length (4096 tokens)."


def event(message: str = SGLANG) -> bytes:
    """The event in which SGLang refuses a streamed request."""
    error = {"object": "error", "message": message, "type": "BadRequestError", "code": 400}
    return b"data: " + json.dumps({"error": error}).encode() + b"\n\n"


async def refused(
    engine: FakeEngine, path: str, answer: Answer, *, stream: bool = False
) -> httpx.Response:
    """The proxy's answer to a request that the engine answers so."""
    engine.answers.append(answer)
    asked = {"model": MODEL, "stream": stream, **REQUESTS[path]}
    async with proxy_before(engine) as client:
        return await client.post(path, json=asked)


def check(path: str, error: dict[str, Any], status: int = 400) -> None:
    """Check that all clients of the API would compact."""
    message = error["message"]
    if path == "/v1/messages":
        assert error["type"] == "invalid_request_error"
        for client in ANTHROPIC_CLIENTS:
            assert client.recognises(status, error["type"], message), client.name
        return
    assert (error["code"], error["type"]) == (CODE, "invalid_request_error")
    for client in OPENAI_CLIENTS:
        assert client.recognises(status, error["code"], message), client.name


@pytest.mark.parametrize("words", ENGINES, ids=[each.who for each in ENGINES])
async def test_every_engines_words_are_understood(engine: FakeEngine, words: Words) -> None:
    """Clients recognise each engine's refusal in the API they speak, and it has the figures."""
    for path in ("/v1/chat/completions", "/v1/messages"):
        answer = await refused(engine, path, Answer([words.raw], status=words.status))
        assert answer.status_code == 400
        error = answer.json()["error"]
        check(path, error)
        if words.prompt is not None and words.limit is not None:
            total = words.prompt + (words.answer or 0)
            assert str(total) in error["message"]
            assert str(words.limit) in error["message"]


@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_status_is_400(engine: FakeEngine, path: str, stream: bool) -> None:
    """The whole answer and the stream that hasn't begun are refused with the API's own error,
    whether the engine does so by its status or by its first event."""
    status = Answer([json.dumps({"message": SGLANG, "code": 400}).encode()], status=400)
    answers = [status, Answer([event()], content_type=SSE)] if stream else [status]
    for each in answers:
        answer = await refused(engine, path, each, stream=stream)
        assert (answer.status_code, len(engine.bodies)) == (400, answers.index(each) + 1)
        check(path, answer.json()["error"])
        if path != "/v1/messages":
            assert answer.json()["error"]["param"] == next(iter(REQUESTS[path]))
        if path == "/v1/messages":
            assert (
                answer.json()["error"]["message"]
                == "prompt is too long: 5000 tokens > 4096 maximum"
            )


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_a_stream_that_has_begun_ends_with_the_error(engine: FakeEngine, path: str) -> None:
    """The error comes as the API reports errors in streams; a failed response has the code, too."""
    parts = [chunk({"role": "assistant", "content": "a"}), event()]
    answer = await refused(engine, path, Answer(parts, content_type=SSE), stream=True)
    assert answer.status_code == 200
    if path == "/v1/chat/completions":
        last = json.loads(answer.text.rstrip().rpartition("data: ")[2])
        check(path, last["error"])
        return
    found = events(answer.text)
    if path == "/v1/messages":
        check(path, found[-1]["error"])
        return
    assert [each["type"] for each in found[-2:]] == ["error", "response.failed"]
    assert found[-2]["code"] == found[-1]["response"]["error"]["code"] == CODE


async def test_a_websocket_has_the_same_error(engine: FakeEngine) -> None:
    """Its error event has the status and the error of the HTTP route."""
    engine.answers += [Answer([event()], content_type=SSE)]
    with socket_proxy(engine) as proxy:
        async with proxy.socket() as ws:
            found = await ws.refused("Hello.")
    assert found["status"] == 400
    check("/v1/responses", found["error"])


async def test_an_answer_that_leaves_no_room_can_be_shortened(engine: FakeEngine) -> None:
    """Anthropic's clients read three figures from its text, and ask for a shorter answer."""
    words = next(each for each in ENGINES if each.who == "replay")
    answer = await refused(engine, "/v1/messages", Answer([words.raw], status=400))
    message = answer.json()["error"]["message"]
    assert message.startswith("prompt is too long: 5010 tokens > 4096 maximum")
    assert "input length and `max_tokens` exceed context limit: 10 + 5000 > 4096" in message
