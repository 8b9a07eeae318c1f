"""Limits of connections, with the real server on loopback and clients that misbehave."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Send
from support.fake_engine import MODEL, Answer, FakeEngine, chat_stream, chunk
from support.metrics_page import metric

from leyline_lab.stand_ins.serving import serving
from leyline_proxy.http.app import create_app
from leyline_proxy.http.server import ProxyServer, listening
from leyline_proxy.settings import Settings

CHAT = "/v1/chat/completions"
SSE = "text/event-stream"
MESSAGES = [{"role": "user", "content": "Hi."}]
Address = tuple[str, int]


@contextmanager
def proxy(engine: FakeEngine | None = None, **settings: Any) -> Iterator[Address]:
    """The address of a proxy that runs as by ``leyline serve``."""
    with running_server(engine, **settings) as (_, address):
        yield address


@contextmanager
def running_server(
    engine: FakeEngine | None = None, **settings: Any
) -> Iterator[tuple[ProxyServer, Address]]:
    """Such a proxy, in a thread."""
    quick = {"shutdown_grace_s": 1, "allowed_hosts": ("p",), **settings}
    if engine is not None:
        given = Settings(handshake_retry_s=0.05, **quick)
        app = create_app(given, engine_app=engine)
    else:
        given = Settings(**quick)
        app = create_app(given)
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    server = ProxyServer(app, given, app.state.services.shutdown, door=listening(listener))
    thread = threading.Thread(target=server.run, args=([],))
    thread.start()
    try:
        deadline = time.monotonic() + 30
        while not server.started:
            assert thread.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield server, listener.getsockname()
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
        listener.close()


class Raw:
    """A connection whose bytes are written by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        """Write, if the other side still listens."""
        self.writer.write(data)
        with suppress(ConnectionError):
            await self.writer.drain()

    async def rest(self, timeout_s: float = 5.0) -> bytes:
        """All that comes until the other side closes."""
        found = b""
        async with asyncio.timeout(timeout_s):
            with suppress(ConnectionError):
                while data := await self.reader.read(65536):
                    found += data
        return found


@asynccontextmanager
async def raw(address: Address) -> AsyncIterator[Raw]:
    """A connection."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        yield Raw(reader, writer)
    finally:
        writer.transport.abort()
        await asyncio.sleep(0)  # it closes in the loop's next turn


def head(length: int, *headers: bytes) -> bytes:
    """The head of a chat request."""
    lines = [
        b"POST /v1/chat/completions HTTP/1.1",
        b"host: p",
        b"content-type: application/json",
        *headers,
    ]
    return b"\r\n".join([*lines, b"content-length: %d" % length, b"", b""])


def chat(**members: Any) -> bytes:
    """A chat request, on the wire."""
    body = json.dumps({"model": MODEL, "messages": MESSAGES, **members}).encode()
    return head(len(body)) + body


def status(answer: bytes) -> int:
    """The status of an answer; 0 for none."""
    return int(answer.split(b" ", 2)[1]) if answer else 0


async def test_who_is_turned_away_takes_up_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit, a few connections are kept until their clients have read the refusal."""
    monkeypatch.setattr("leyline_proxy.http.connection._MAX_TURNED_AWAY", 3)
    async with AsyncExitStack() as stack:
        server, address = stack.enter_context(running_server(FakeEngine(), max_connections=1))
        clients = [await stack.enter_async_context(raw(address)) for _ in range(10)]
        shared = server.config.http_protocol_class.shared  # type: ignore[union-attr]
        for client in clients[1:]:
            assert b" 503 " in await client.reader.readuntil(b"\r\n")
            assert len(shared.lingering) <= 3
        assert len(shared.lingering) == 3


@pytest.fixture(scope="module")
def tight() -> Iterator[Address]:
    """A proxy with room for little more than the head of :func:`chat`."""
    with proxy(FakeEngine(), max_headers=8, max_header_bytes=1024, log_level="error") as address:
        yield address


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
async def test_connections_send_at_once_on_either_loop(loop: str) -> None:
    """The loop is the one that the setting names; on none does an answer's body wait until the
    client has acknowledged its head."""
    async with AsyncExitStack() as stack:
        server, address = stack.enter_context(running_server(FakeEngine(), loop=loop))
        client = await stack.enter_async_context(raw(address))
        await client.send(b"GET /healthz HTTP/1.1\r\nhost: p\r\n\r\n")
        await client.reader.readuntil(b'"ok"}')
        (connection,) = server.server_state.connections
        assert type(connection.loop).__module__.startswith(loop)
        sock = connection.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([b"x: " + b"a" * 900], 200),
        ([b"x: " + b"a" * 70_000], 431),
        ([b"x%d: a" % number for number in range(15)], 200),
        ([b"x%d: a" % number for number in range(100)], 431),
        ([b"x" * 300_000 + b": a"], 431),
    ],
    ids=["one", "long", "some", "many", "long name"],
)
async def test_headers_have_limits(headers: list[bytes], expected: int) -> None:
    """Too many or too long ones are refused with 431, ordinary ones not."""
    with proxy(FakeEngine(), max_headers=20, max_header_bytes=2048) as address:
        async with raw(address) as client:
            body = chat().partition(b"\r\n\r\n")[2]
            await client.send(head(len(body), b"connection: close", *headers) + body)
            assert status(await client.rest()) == expected


async def test_headers_that_never_end_are_cut_off() -> None:
    """This also holds for small pieces of one header, which the parser doesn't report."""
    with proxy(FakeEngine(), max_header_bytes=2048) as address:
        async with raw(address) as client:
            await client.send(b"GET / HTTP/1.1\r\nx: ")
            for _ in range(400):
                await client.send(b"a" * 64)
                await asyncio.sleep(0)
            assert status(await client.rest()) == 431


async def test_a_header_that_is_too_long_is_cut_off_when_it_comes_at_once() -> None:
    """Nothing more need come before it is answered."""
    with proxy(FakeEngine(), max_header_bytes=2048) as address:
        async with raw(address) as client:
            await client.send(b"GET / HTTP/1.1\r\nx: " + b"a" * 25_600)
            assert status(await client.rest()) == 431


CHUNKED = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: p\r\n"
    b"content-type: application/json\r\ntransfer-encoding: chunked\r\n"
)
ENDLESS = {
    "trailer": CHUNKED + b"\r\n1\r\n{\r\n0\r\nx: ",
    "trailer after the answer": CHUNKED + b"content-encoding: gzip\r\n\r\n1\r\n{\r\n0\r\nx: ",
    "chunk extension": CHUNKED + b"\r\n1;x=",
    "header after a request": b"GET /healthz HTTP/1.1\r\nhost: p\r\n\r\nGET / HTTP/1.1\r\nx: ",
}


@pytest.mark.parametrize("begun", ENDLESS.values(), ids=ENDLESS)
async def test_what_never_ends_is_cut_off(tight: Address, begun: bytes) -> None:
    """No part of a request of which the parser says nothing before its end is read for ever, before
    the request has an answer or after."""
    async with raw(tight) as client:
        await client.send(begun)
        reading = asyncio.create_task(client.rest(20))
        sent, piece = 0, b"a" * 65536
        with suppress(ConnectionError):
            while sent < 64_000_000:
                client.writer.write(piece)
                await client.writer.drain()
                sent += len(piece)
        # Most of it lies in the kernel's buffers.
        assert sent < 32 * 1024 * 1024
        answer = await reading
    whole = begun.count(b"\r\n\r\nGET ")  # requests that came in front of it, and were answered
    assert answer.count(b"HTTP/1.1 ") <= whole + 1


@pytest.mark.parametrize(
    ("part", "at_once"), [(b"1;x=%b\r\n \r\n" % (b"a" * 500), 100), (b"1\r\n \r\n", 9000)]
)
async def test_many_small_parts_are_no_way_round(tight: Address, part: bytes, at_once: int) -> None:
    """A byte of a body here and there doesn't pay for framing without end, nor do chunks of one
    byte, each of which costs as much as a large one."""
    async with raw(tight) as client:
        await client.send(CHUNKED + b"\r\n")
        with suppress(ConnectionError):
            for _ in range(200):
                client.writer.write(part * at_once)
                await client.writer.drain()
        assert client.writer.is_closing()


async def test_small_chunks_are_a_body(tight: Address) -> None:
    """Parts of eight bytes pay for their own framing."""
    body = json.dumps({"model": MODEL, "messages": MESSAGES}).encode() + b" " * 80_000
    chunks = b"".join(b"8\r\n%b\r\n" % body[at : at + 8].ljust(8) for at in range(0, len(body), 8))
    async with raw(tight) as client:
        await client.send(CHUNKED + b"connection: close\r\n\r\n" + chunks + b"0\r\n\r\n")
        assert status(await client.rest()) == 200


async def test_trailers_are_no_headers() -> None:
    """Fields after a body can't pretend to be the headers judged before it."""
    engine = FakeEngine()
    body = json.dumps({"model": MODEL, "messages": MESSAGES}).encode()
    async with AsyncExitStack() as stack:
        address = stack.enter_context(proxy(engine))
        client = await stack.enter_async_context(raw(address))
        parts = CHUNKED, b"connection: close\r\nx-mine: 1\r\n\r\n%x\r\n" % len(body), body
        await client.send(b"".join(parts) + b"\r\n0\r\nx-theirs: 1\r\n\r\n")
        assert status(await client.rest()) == 200
    assert "x-mine" in engine.headers[0]
    assert "x-theirs" not in engine.headers[0]


async def test_requests_that_wait_on_one_connection_are_few() -> None:
    """Thousands of small requests sent at once after a slow one aren't kept."""
    engine = FakeEngine()
    engine.answers = [Answer(hangs=True)]
    async with AsyncExitStack() as stack:
        address = stack.enter_context(proxy(engine))
        client = await stack.enter_async_context(raw(address))
        await client.send(chat() + b"GET /healthz HTTP/1.1\r\nhost: p\r\n\r\n" * 5000)
        assert status(await client.rest()) == 0


async def test_a_refusal_doesnt_cut_into_an_answer() -> None:
    """A fault of a further request isn't reported in the middle of the answer before it."""
    engine = FakeEngine()
    first, *_ = chat_stream("x").chunks
    engine.answers = [Answer([first], content_type=SSE, hangs=True)]
    async with AsyncExitStack() as stack:
        address = stack.enter_context(proxy(engine))
        client = await stack.enter_async_context(raw(address))
        await client.send(chat(stream=True))
        begun = await client.reader.readuntil(b"\n\n")
        await client.send(b"NONSENSE\r\n\r\n")
        assert (begun + await client.rest()).count(b"HTTP/1.1 ") == 1


async def test_slow_headers_are_given_up() -> None:
    """A client that drips headers, blank lines or nothing is closed in time; one that has been
    answered may take its time for the next request."""
    with proxy(FakeEngine(), header_timeout_s=0.4) as address:

        async def drip(first: bytes, drop: bytes) -> tuple[float, int]:
            async with raw(address) as client:
                began = time.monotonic()
                await client.send(first)
                reading = asyncio.create_task(client.rest())
                while not reading.done():
                    await client.send(drop)
                    await asyncio.sleep(0.05)
                return time.monotonic() - began, status(await reading)

        dripped = await asyncio.gather(
            drip(b"GET / HTTP/1.1\r\n", b"x: y\r\n"),
            drip(b"", b"\r\n"),
            drip(b"", b""),
            drip(b"GET /healthz HTTP/1.1\r\nhost: p\r\n\r\n", b"\r\n"),
        )
        assert all(0.3 < took < 1.5 for took, _ in dripped), dripped
        assert [code for _, code in dripped] == [408, 0, 0, 200]
        async with raw(address) as client:
            for _ in range(2):
                await client.send(b"GET /healthz HTTP/1.1\r\nhost: p\r\n\r\n")
                assert await client.reader.readuntil(b'"ok"}')
                await asyncio.sleep(0.6)


@pytest.mark.parametrize(("path", "shape"), [(CHAT, "code"), ("/v1/messages", "type")])
async def test_a_slow_body_is_given_up(path: str, shape: str) -> None:
    """A client that drips its body gets a 408 in its API's shape, and the connection closes."""
    with proxy(FakeEngine(), body_timeout_s=0.3) as address:
        async with raw(address) as client:
            await client.send(head(10_000).replace(CHAT.encode(), path.encode()))
            reading = asyncio.create_task(client.rest())
            while not reading.done():
                await client.send(b" ")
                await asyncio.sleep(0.05)
            answer = await reading
    assert status(answer) == 408
    assert b"connection: close" in answer
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert error[shape] in ("request_timeout", "invalid_request_error")


async def test_bodies_that_come_have_a_limit_in_number() -> None:
    """A tenant has no more of them in memory than may run and wait; if one is given up, another may
    come, and any that comes meanwhile has to try later."""
    request = json.dumps({"model": MODEL, "messages": MESSAGES}).encode()
    whole = head(len(request), b"connection: close") + request

    async def until(address: Address, wanted: int) -> bytes:
        """The first answer with that status."""
        async with asyncio.timeout(5):
            while True:
                async with raw(address) as client:
                    await client.send(whole)
                    answer = await client.rest()
                if status(answer) == wanted:
                    return answer

    with proxy(FakeEngine(), max_concurrent=1, max_queued=2) as address:
        async with AsyncExitStack() as stack:
            for _ in range(3):
                client = await stack.enter_async_context(raw(address))
                await client.send(whole[:-9])
            refused = await until(address, 429)
            assert b"queue_full" in refused
            assert b"retry-after: " in refused
        await until(address, 200)


async def test_a_body_too_large_ends_the_connection() -> None:
    """Bytes after the limit aren't read for ever."""
    with proxy(FakeEngine(), max_body_bytes=1024) as address:
        async with raw(address) as client:
            await client.send(head(10_000_000) + b" " * 2000)
            answer = await client.rest()
    assert status(answer) == 413
    assert b"request_too_large" in answer


async def test_connections_have_a_limit() -> None:
    """One too many is turned away with 503; when one has gone, another is let in."""
    request = b"GET /healthz HTTP/1.1\r\nhost: p\r\n\r\n"
    with proxy(FakeEngine(), max_connections=2) as address:
        async with raw(address) as first, AsyncExitStack() as stack:
            second = await stack.enter_async_context(raw(address))
            for client in (first, second):
                await client.send(request)
                assert b"200" in await client.reader.read(100)
            async with raw(address) as third:
                await third.send(request)
                assert status(await third.rest()) == 503
            await stack.aclose()
            async with asyncio.timeout(5):
                while True:
                    async with raw(address) as again:
                        await again.send(request)
                        if b"200" in await again.reader.read(100):
                            break


@given(st.lists(st.integers(1, 1400), max_size=6), st.integers(1, 3))
def test_limits_dont_depend_on_how_bytes_arrive(
    tight: Address, cuts: list[int], requests: int
) -> None:
    """A request that keeps them is served, cut anywhere and with others on its connection; one
    that doesn't is refused, cut anywhere."""
    allowed = chat() * requests
    refused = chat().replace(b"host: p", b"x: " + b"a" * 1100)
    for data, expected in ((allowed, 200), (refused, 431)):
        with socket.create_connection(tight, timeout=10) as client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            edges = [0, *sorted({cut for cut in cuts if cut < len(data)}), len(data)]
            found = b""
            with suppress(ConnectionError):
                for start, end in itertools.pairwise(edges):
                    client.sendall(data[start:end])
                while found.count(b"HTTP/1.1 200") < requests or not found.endswith(b"}"):
                    received = client.recv(65536)
                    if not received:
                        break
                    found += received
        assert status(found) == expected
        assert found.count(b"HTTP/1.1 200") == (requests if expected == 200 else 0)


class Torrent(FakeEngine):
    """Streams for ever, as fast as it is read; counts what it sent."""

    sent_bytes = 0

    async def send_answer(self, answer: Answer, send: Send) -> None:
        if answer.content_type != SSE:
            await super().send_answer(answer, send)
            return
        raw_headers = [(b"content-type", SSE.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": raw_headers})
        part = chunk({"content": "a" * 60_000})
        while True:
            await send({"type": "http.response.body", "body": part, "more_body": True})
            self.sent_bytes += len(part)
            await asyncio.sleep(0)  # where nothing holds it up, sending never yields


async def running(address: Address, tenant: str = "default") -> float:
    """Requests under way."""
    async with httpx.AsyncClient(base_url=f"http://{address[0]}:{address[1]}") as client:
        return await metric(client, f'leyline_queue_running{{tenant="{tenant}"}}')


async def test_who_stops_reading_is_cut_off() -> None:
    """Little is buffered for such a client, its place is free again after the time it has, and the
    engine has to stop; a slow one that keeps reading is served."""
    engine = Torrent()
    with serving(engine) as upstream, proxy(upstream=upstream, stall_timeout_s=0.6) as address:
        async with raw(address) as stalled, raw(address) as slow:
            for client in (stalled, slow):
                await client.send(chat(stream=True))
            began = time.monotonic()
            stalled.writer.transport.pause_reading()  # type: ignore[attr-defined]
            while engine.disconnects == 0:
                assert time.monotonic() - began < 8
                await slow.reader.read(1 << 20)
                await asyncio.sleep(0.02)
            assert time.monotonic() - began > 0.5
            buffered = engine.sent_bytes
            while await running(address) != 1:
                assert time.monotonic() - began < 8
            for _ in range(5):
                assert await slow.reader.read(1 << 20)
        began = time.monotonic()
        while await running(address):
            assert time.monotonic() - began < 5
    # Most of it in the kernel's buffers, of two connections each; unheld, it would be gigabytes.
    assert buffered < 100_000_000


async def test_a_thousand_half_open_clients_hurt_nobody() -> None:
    """Streams that never end, heads and bodies that never come, all of one tenant: another's
    requests are answered as ever."""
    engine = FakeEngine()
    keys = {"api_keys": ["red:kr", "blue:kb"], "max_concurrent": 300}
    with proxy(engine, **keys) as address:
        origin = f"http://{address[0]}:{address[1]}"
        async with AsyncExitStack() as stack:
            body = json.dumps({"model": MODEL, "messages": MESSAGES, "stream": True}).encode()
            whole = head(len(body), b"authorization: Bearer kr") + body
            engine.answers = [
                Answer([chunk({"content": "a"})], content_type=SSE, hangs=True) for _ in range(225)
            ]
            for start in range(0, 1000, 100):
                clients = await asyncio.gather(
                    *(stack.enter_async_context(raw(address)) for _ in range(100))
                )
                for number, client in enumerate(clients, start):
                    cut = len(whole) if number < 500 else -1 - (number % 90)
                    await client.send(whole[:cut])
            began = time.monotonic()
            # One that is let in is planned before it takes its answer.
            while await running(address, "red") < 225 or engine.answers:
                assert time.monotonic() - began < 10
            async with httpx.AsyncClient(base_url=origin) as other:
                times = []
                for _ in range(20):
                    began = time.monotonic()
                    answer = await other.post(
                        CHAT,
                        json={"model": MODEL, "messages": MESSAGES},
                        headers={"authorization": "Bearer kb"},
                    )
                    times.append(time.monotonic() - began)
                    assert answer.status_code == 200
        assert sorted(times)[10] < 0.25, times
        began = time.monotonic()
        while await running(address, "red"):
            assert time.monotonic() - began < 10
