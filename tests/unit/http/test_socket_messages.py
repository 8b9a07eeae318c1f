"""Messages over WebSocket are admitted before they are read, and each has an end."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from typing import Any

import httpx
import pytest
from support.fake_engine import MODEL, FakeEngine
from support.responses_route import scripted
from support.sockets import Socket, SocketProxy, begun, framed_parts, socket_proxy, until
from websockets.exceptions import ConnectionClosed

from leyline_proxy.apis.responses.socket import read_frame

JSON = {"content-type": "application/json"}
LONG = "long " * 2000
"""Longer than a message that is read before it is admitted."""


def message(text: str = LONG, **members: Any) -> str:
    """A request for a response."""
    return json.dumps({"type": "response.create", "model": MODEL, "input": text, **members})


def kept(proxy: SocketProxy) -> list[int]:
    """Bytes that the proxy keeps of each connection's unfinished message, fewest first."""
    found: list[Any] = list(proxy.server.server_state.connections)
    return sorted(
        len(each.conn.reader.buffer) + sum(map(len, each.frames))
        for each in found
        if hasattr(each, "conn") and hasattr(each.conn, "reader")
    )


def write(ws: Socket, data: bytes) -> None:
    """Send bytes as they are."""
    ws.connection.transport.write(data)


async def ended(ws: Socket) -> tuple[int, str, int | None]:
    """Status and code of the last event, and the code of the close after it."""
    async with asyncio.timeout(60):
        event = await ws.event()
        with pytest.raises(ConnectionClosed):
            await ws.event()
    return event["status"], event["error"]["code"], ws.connection.close_code


async def test_nothing_is_unpacked(engine: FakeEngine) -> None:
    """No compression is agreed on, and a frame that is marked as compressed ends the connection."""
    with socket_proxy(engine) as proxy:
        async with proxy.socket(compression="deflate") as ws:
            assert ws.connection.protocol.extensions == []
            write(ws, bytes([0xC1]) + begun("{}")[1:])
            with pytest.raises(ConnectionClosed):
                await ws.event()
            assert ws.connection.close_code == 1002


async def test_a_message_beyond_the_rate_is_never_kept(engine: FakeEngine) -> None:
    """It is refused at its first bytes; the rest is thrown away, and the connection stays."""
    engine.answers += [scripted()] * 2
    limits = {"default": {"requests_per_minute": 1}}
    with socket_proxy(engine, tenants=limits) as proxy:
        async with proxy.socket() as ws:
            await ws.ask(LONG)
            write(ws, framed_parts("x" * 100_000)[:50_000])
            refused = await ws.event()
            assert (refused["status"], refused["error"]["code"]) == (429, "rate_limit_exceeded")
            write(ws, framed_parts("x" * 100_000)[50_000:])
            write(ws, framed_parts("x" * 100_000, first=False))
            await (await ws.connection.ping())
            assert kept(proxy) == [0]
            write(ws, framed_parts("x" * 100_000, first=False, fin=True))
            for text in ("short", LONG):
                assert (await ws.refused(text))["error"]["code"] == "rate_limit_exceeded"
    assert len(engine.bodies) == 1


async def test_unfinished_messages_hold_the_places_of_their_tenant(engine: FakeEngine) -> None:
    """Those of other connections, and bodies over HTTP, are then refused before they are read."""
    engine.answers += [scripted()] * 2
    whole = begun(message("x" * 300_000))
    limits = {"default": {"max_concurrent": 1, "max_queued": 0}}
    with socket_proxy(engine, tenants=limits) as proxy:
        async with proxy.socket() as first, proxy.socket() as second:
            write(first, whole[:200_000])
            await until(lambda: kept(proxy)[-1] >= 199_000)
            write(second, whole)
            refused = await second.event()
            async with httpx.AsyncClient(base_url=proxy.origin) as client:
                over_http = await client.post("/v1/responses", content=message(), headers=JSON)
            await (await second.connection.ping())
            assert kept(proxy)[0] == 0
            write(first, whole[200_000:])
            assert (await first.events())[-1]["type"] == "response.completed"
    assert (refused["status"], refused["error"]["code"]) == (429, "queue_full")
    assert over_http.status_code == 429


async def test_a_message_that_is_never_finished_ends_its_connection(engine: FakeEngine) -> None:
    """After body_timeout_s, in one frame or in several; its place is then free."""
    limits = {"default": {"max_concurrent": 1, "max_queued": 0}}
    with socket_proxy(engine, body_timeout_s=0.3, tenants=limits) as proxy:
        for unfinished in (begun(message(), 5000), begun(message())[:600], framed_parts("{", " ")):
            await until(lambda: not proxy.services.gate._reading)
            async with proxy.socket() as ws:
                write(ws, unfinished)
                assert await ended(ws) == (408, "request_timeout", 1008)
        await until(lambda: not proxy.services.gate._reading)


async def test_a_message_in_crumbs_ends_its_connection(engine: FakeEngine) -> None:
    """Each part costs more than its bytes. As many parts of a usual size are a message."""
    engine.answers.append(scripted())
    text = message("x" * 2_500_000)
    parts = [text[at : at + 1500] for at in range(0, len(text), 1500)]
    with socket_proxy(engine) as proxy:
        async with proxy.socket() as ws:
            write(ws, framed_parts(*parts, fin=True))
            assert (await ws.events())[-1]["type"] == "response.completed"
            write(ws, framed_parts(*[""] * len(parts)))
            assert await ended(ws) == (429, "too_many_frames", 1008)


async def test_pings_without_end_end_their_connection(engine: FakeEngine) -> None:
    """Each is answered, so that a client that reads no answers would fill the memory."""
    with socket_proxy(engine) as proxy:
        async with proxy.socket() as ws:
            write(ws, b"\x89\x80\0\0\0\0" * 2000)
            assert await ended(ws) == (429, "too_many_frames", 1008)


async def test_frames_that_ask_for_nothing_are_bounded_and_free(engine: FakeEngine) -> None:
    """They take nothing of the rate; 64 in a row end the connection."""
    engine.answers += [scripted()] * 2
    processed = '{"type": "response.processed", "response_id": "resp_1"}'
    with socket_proxy(engine, tenants={"default": {"requests_per_minute": 2}}) as proxy:
        async with proxy.socket() as ws:
            for _ in range(2):
                await ws.ask()
                await ws.connection.send(processed)
            for _ in range(63):
                await ws.connection.send(processed)
            with pytest.raises(ConnectionClosed):
                await ws.event()
            assert ws.connection.close_code == 1008


def test_members_without_end_become_no_objects() -> None:
    """The connection reads four members of a message, and skips others, however many they are."""
    text = json.dumps({"type": "response.create", "stream_id": "a", "generate": False})
    text = text[:-1] + "".join(f',"{number}":0' for number in range(200_000)) + ',"stream_id":"b"}'
    tracemalloc.start()
    create = read_frame(text.encode())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert create is not None
    assert (create.lane, create.generates) == ("b", False)
    assert create.body.endswith(b',"stream":true}')
    assert peak < 5 * len(text)


@pytest.mark.parametrize(
    ("member", "code"),
    [
        ('"input":[' + "[]," * 300_000 + "0]", "too_many_values"),
        ('"client_metadata":{"a":"' + "a" * 40_000 + '"}', "invalid_request"),
    ],
    ids=["values", "metadata"],
)
async def test_what_would_take_long_to_decode_is_refused(
    engine: FakeEngine, member: str, code: str
) -> None:
    """Values are counted in front of any decoding, and what the connection decodes itself is short;
    the connection stays."""
    engine.answers += [scripted()]
    with socket_proxy(engine) as proxy:
        async with proxy.socket() as ws:
            await ws.connection.send('{"type":"response.create",' + member + "}")
            event = await ws.event()
            assert (event["status"], event["error"]["code"]) == (400, code)
            await ws.ask()


@pytest.mark.parametrize("piece", [1, 7, 1000])
async def test_messages_are_whole_however_their_bytes_come(engine: FakeEngine, piece: int) -> None:
    """In pieces that cut heads and payloads, with pings between the parts, or many in a piece."""
    engine.answers += [scripted()] * 4
    text = message("words " * 300)
    third = len(text) // 3
    ping = b"\x89\x84\0\0\0\0ping"
    parts = framed_parts(text[:third], text[third : 2 * third]) + ping
    data = parts + framed_parts(text[2 * third :], first=False, fin=True) + begun(message("short"))
    with socket_proxy(engine) as proxy:
        async with proxy.socket() as ws:
            for at in range(0, len(data), piece):
                write(ws, data[at : at + piece])
                await asyncio.sleep(0)
            write(ws, begun(text) + begun(text))
            found = [(await ws.events())[-1]["type"] for _ in range(4)]
    assert found == ["response.completed"] * 4
    sent = [json.loads(body)["messages"][-1]["content"] for body in engine.bodies[-4:]]
    assert sent == ["words " * 300, "short", "words " * 300, "words " * 300]
