"""Answers that are given before their request was read, by a plain server on loopback."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from starlette.types import Message, Receive, Scope, Send
from support.fake_engine import FakeEngine

from leyline_lab.stand_ins.serving import serving
from leyline_proxy.http import early_answers
from leyline_proxy.http.app import create_app
from leyline_proxy.http.early_answers import EarlyAnswers
from leyline_proxy.settings import Settings

Address = tuple[str, int]
LIMIT = 4 * 1024 * 1024
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: p\r\n"
SMALL = HEAD + b"content-length: 1\r\n\r\n{"


@pytest.fixture(scope="module")
def address() -> Iterator[Address]:
    """A proxy that asks for a key, and that any server might serve."""
    settings = Settings(
        max_body_bytes=LIMIT, body_timeout_s=0.3, api_keys=["red:kr"], log_level="error"
    )
    with serving(create_app(settings, engine_app=FakeEngine())) as origin:
        yield "127.0.0.1", int(origin.rpartition(":")[2])


@pytest.fixture
def client(address: Address) -> Iterator[socket.socket]:
    """A connection."""
    with socket.create_connection(address, timeout=20) as found:
        yield found


def answer(client: socket.socket, last: bytes = b"}") -> bytes:
    """Return the answer up to an error's end, or the connection's."""
    found = b""
    with suppress(ConnectionError):
        while (received := client.recv(65536)) and not found.endswith(last):
            found += received
            if found.endswith(last):
                break
    return found


KEY = b"authorization: Bearer kr\r\n"
EARLY = {
    "413": (KEY, b"request_too_large"),
    "415": (KEY + b"content-encoding: br\r\n", b"content-encoding"),
    "401": (b"", b"invalid_api_key"),
}


@pytest.mark.parametrize(("headers", "code"), EARLY.values(), ids=EARLY)
def test_a_client_that_still_sends_reads_its_answer(
    client: socket.socket, headers: bytes, code: bytes
) -> None:
    """No reset overtakes the body of an answer that came before the request's end, on a connection
    whose client has learnt to take its time with acknowledgements."""
    for _ in range(3):
        client.sendall(SMALL)
        assert b" 401 " in answer(client)
    length = b"content-length: %d\r\n\r\n" % (2 * LIMIT)
    client.sendall(HEAD + headers + length + b" " * (2 * LIMIT))
    found = answer(client)
    assert code in found
    assert b"connection: close" in found
    assert client.recv(1) == b""


def test_a_slow_body_reads_its_answer(client: socket.socket) -> None:
    """A client that keeps sending after the answer "too slow" reads that answer."""
    client.sendall(HEAD + KEY + b"content-length: %d\r\n\r\n" % LIMIT)
    time.sleep(0.5)
    client.sendall(b" " * LIMIT)
    assert b"request_timeout" in answer(client)


def test_a_connection_whose_request_is_here_stays(client: socket.socket) -> None:
    """An early answer to a request that has come whole is no reason to connect again."""
    for _ in range(2):
        client.sendall(SMALL)
        found = answer(client)
        assert b" 401 " in found
        assert b"connection: close" not in found


def test_a_body_that_waits_to_be_asked_for_isnt(client: socket.socket) -> None:
    """If the answer is a refusal, the client isn't asked to send a body that no one reads."""
    client.sendall(HEAD + b"expect: 100-continue\r\ncontent-length: 10\r\n\r\n")
    found = answer(client)
    assert found.startswith(b"HTTP/1.1 401 ")
    assert b"100 Continue" not in found


async def refusing(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers, and reads nothing."""
    await send({"type": "http.response.start", "status": 400, "headers": []})
    await send({"type": "http.response.body", "body": b"no"})


@pytest.mark.parametrize("pause_s", [0.0, 60.0], ids=["endless", "silent"])
async def test_reading_on_has_an_end(pause_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither bytes without end nor silence hold a connection that has been answered; what the
    client is to read is sent before."""
    monkeypatch.setattr(early_answers, "_READ_S", 0.2)
    sent: list[Message] = []
    read = 0

    async def receive() -> Message:
        nonlocal read
        assert read == 0 or b"no" in [message.get("body") for message in sent]
        await asyncio.sleep(pause_s)
        read += 1024 * 1024
        return {"type": "http.request", "body": b" " * 1024 * 1024, "more_body": True}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "http_version": "1.1", "headers": [(b"transfer-encoding", b"chunked")]}
    async with asyncio.timeout(5):
        await EarlyAnswers(refusing)(scope, receive, send)
    assert [message.get("more_body", False) for message in sent] == [False, True, False]
    assert sent[0]["headers"] == [(b"connection", b"close")]
    assert read <= 65 * 1024 * 1024
