"""Limits and ends of WebSocket connections, on the proxy's own server."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import replace
from typing import Any

import httpx
import pytest
from support.fake_engine import Answer, FakeEngine, chat_json, chat_stream
from support.messages_route import kinds
from support.metrics_page import REQUESTS, metric
from support.responses_route import scripted
from support.sockets import SocketProxy, begun, socket_proxy, until
from websockets.exceptions import ConnectionClosed, InvalidStatus

RED, BLUE = "key-of-the-red-tenant", "key-of-the-blue-tenant"
KEYS = (f"red:{RED}", f"blue:{BLUE}")


def opened(text: str, **options: Any) -> Answer:
    """A stream that doesn't end by itself."""
    answer = chat_stream(text, **options)
    return replace(answer, chunks=answer.chunks[:2])


async def counted(proxy: SocketProxy, status: str) -> float:
    """Requests of the route with a status."""
    async with httpx.AsyncClient(base_url=proxy.origin) as client:
        return await metric(client, REQUESTS, 'route="/v1/responses"', f'status="{status}"')


async def status_of(proxy: SocketProxy, key: str | None = None, **options: Any) -> tuple[int, str]:
    """Status and code of a refused handshake."""
    with pytest.raises(InvalidStatus) as refused:
        async with proxy.socket(key, **options):
            pass
    response = refused.value.response
    return response.status_code, json.loads(response.body or b"{}")["error"]["code"]


async def test_errors_come_as_events_and_the_connection_stays(engine: FakeEngine) -> None:
    """Each names its field, as over HTTP; the next request is answered."""
    with socket_proxy(engine, tenants={"default": {"max_body_bytes": 2048}}) as proxy:
        async with proxy.socket() as ws:
            send = ws.connection.send
            got = []
            for frame in ("{", "[]", '{"type": "response.steer"}', b"{}", "\ud7ff" * 9, "{" * 5999):
                await send(frame)
                got.append(await ws.event())
            got.append(await ws.refused(model="gone"))
            got.append(await ws.refused([{"role": "x", "content": ""}]))
            got.append(await ws.refused(background=True))
            got.append(await ws.refused(generate="no"))
            got.append(await ws.refused(stream_id=7))
            got.append(await ws.refused("long " * 1000))
            got.append(await ws.refused(store="yes", stream_id="a"))
            await send('{"type": "response.processed", "response_id": "resp_1"}')
            engine.answers.append(scripted())
            response = await ws.ask(stream=False)
    assert {event["type"] for event in got} == {"error"}
    shown = [(event["status"], event["error"]["param"]) for event in got]
    assert shown[:6] == [(400, None)] * 2 + [(400, "type")] + [(400, None)] * 3
    assert shown[6:] == [
        (404, "model"),
        (400, "input[0].role"),
        (400, "background"),
        (400, "generate"),
        (400, "stream_id"),
        (413, None),
        (400, "store"),
    ]
    assert [event.get("stream_id") for event in got] == [None] * 12 + ["a"]
    assert response["status"] == "completed"


async def test_the_engine_gets_what_it_gets_over_http(engine: FakeEngine) -> None:
    """Nothing of the connection, and none of the members that only WebSocket has."""
    engine.answers += [scripted(), scripted()]
    with socket_proxy(engine) as proxy:
        async with httpx.AsyncClient(base_url=proxy.origin) as client:
            asked = {"model": "fake-model", "input": "Hello.", "stream": True}
            headers = {"x-trace": "t", "openai-beta": "responses_websockets=2026-02-06"}
            await client.post("/v1/responses", json=asked, headers=headers)
        async with proxy.socket(headers=headers) as ws:
            await ws.ask(stream_id="a", generate=True)
    over_http, framed = map(json.loads, engine.bodies[-2:])
    for body in (over_http, framed):
        del body["custom_params"]
    assert framed == over_http
    names = [{name for name in headers if name != "user-agent"} for headers in engine.headers[-2:]]
    assert names[1] <= names[0], names
    assert engine.headers[-1]["x-trace"] == "t"


async def test_failures_of_the_engine_are_events(engine: FakeEngine) -> None:
    """In front of the first event an error; after it, a response that failed."""
    busy = chat_json()
    busy.status, busy.headers = 429, {"retry-after": "7"}
    busy.chunks = [b'{"error": {"message": "Busy.", "type": "rate_limit_error"}}']
    engine.answers += [busy, opened("Half", breaks=True, pause_s=0.05)]
    with socket_proxy(engine) as proxy:
        async with proxy.socket() as ws:
            refused = await ws.refused()
            await ws.create()
            *_, error, failed = await ws.events()
    assert (refused["status"], refused["error"]["message"]) == (429, "Busy.")
    assert refused["headers"]["retry-after"] == "7"
    assert (error["type"], failed["type"]) == ("error", "response.failed")
    assert error["error"]["code"] == "upstream_unreachable"
    assert failed["response"]["error"]["message"] == error["error"]["message"]


async def test_a_client_that_leaves_ends_its_requests(engine: FakeEngine) -> None:
    """The engine's stream is closed, and the request is counted as disconnected."""
    engine.answers.append(opened("Hello", hangs=True))
    with socket_proxy(engine) as proxy:
        async with proxy.socket() as ws:
            await ws.create()
            assert (await ws.event())["type"] == "response.created"
        await until(lambda: engine.disconnects == 1)
        for _ in range(200):
            if await counted(proxy, "disconnected"):
                return
            await asyncio.sleep(0.02)
        raise AssertionError("it was not counted")


async def test_a_frame_too_large_ends_the_connection(engine: FakeEngine) -> None:
    """An event and the close say so; nothing goes to the engine. A tenant's own limit holds."""
    smaller = {"default": {"max_body_bytes": 10_000}}
    with socket_proxy(engine, tenants=smaller) as proxy:
        async with proxy.socket() as ws:
            ws.connection.transport.write(begun("x" * 20_000, 100))
            error = await ws.event()
            assert (error["status"], error["error"]["code"]) == (413, "request_too_large")
            with pytest.raises(ConnectionClosed):
                await ws.event()
            assert ws.connection.close_code == 1009
    assert not engine.bodies


async def test_too_many_bad_frames_end_the_connection(engine: FakeEngine) -> None:
    """After 16 in a row that can't be read."""
    with socket_proxy(engine) as proxy:
        async with proxy.socket() as ws:
            for _ in range(16):
                await ws.connection.send("{")
                assert (await ws.event())["error"]["code"] == "invalid_json"
            with pytest.raises(ConnectionClosed):
                await ws.event()
            assert ws.connection.close_code == 1008


async def test_requests_that_wait_are_bounded(engine: FakeEngine) -> None:
    """In number, in bytes and in lanes; the connection stays, and what waits is answered."""
    engine.answers += [chat_stream(*["Hello"] * 8, pause_s=0.2), *(scripted() for _ in range(16))]
    with socket_proxy(engine) as proxy:
        async with proxy.socket() as ws:
            for _ in range(18):
                await ws.create()
            found = [await ws.events() for _ in range(18)]
            codes = [each[-1]["error"]["code"] for each in found if each[-1]["type"] == "error"]
            engine.answers += [chat_stream(*["Hello"] * 4, pause_s=0.2) for _ in range(8)]
            for lane in range(9):
                await ws.create(stream_id=str(lane))
            last = [await ws.event()]
            while last[-1]["type"] != "error":
                last.append(await ws.event())
    assert codes == ["too_many_in_flight"]
    assert (last[-1]["status"], last[-1]["error"]["param"]) == (429, "stream_id")


async def test_connections_of_a_tenant_are_bounded(engine: FakeEngine) -> None:
    """Another tenant still gets one, and a place is free once a connection ends."""
    with socket_proxy(engine, api_keys=KEYS, max_websockets=1) as proxy:
        async with proxy.socket(RED):
            assert await status_of(proxy, RED) == (429, "too_many_websockets")
            async with proxy.socket(BLUE):
                pass
        for _ in range(100):
            try:
                async with proxy.socket(RED):
                    return
            except InvalidStatus:
                await asyncio.sleep(0.02)
    raise AssertionError("the place never became free")


async def test_rates_hold_for_each_request(engine: FakeEngine) -> None:
    """The error says when to try again; the connection doesn't count."""
    engine.answers += [scripted(), scripted()]
    limits = {"red": {"requests_per_minute": 2}}
    with socket_proxy(engine, api_keys=KEYS, tenants=limits) as proxy:
        async with proxy.socket(RED) as ws:
            await ws.ask()
            await ws.ask()
            refused = await ws.refused()
        assert await counted(proxy, "429") == 1
    assert (refused["status"], refused["error"]["code"]) == (429, "rate_limit_exceeded")
    assert int(refused["headers"]["retry-after"]) > 0


async def test_connections_can_be_off(engine: FakeEngine) -> None:
    """The status is the one on which Codex continues over HTTP."""
    with socket_proxy(engine, max_websockets=0) as proxy:
        assert await status_of(proxy) == (426, "websockets_off")


async def test_other_paths_take_none(engine: FakeEngine) -> None:
    """The error names the path that does."""
    with socket_proxy(engine) as proxy, pytest.raises(InvalidStatus) as refused:
        async with proxy.socket(path="/v1/realtime"):
            pass
    error = json.loads(refused.value.response.body or b"")["error"]
    assert (refused.value.response.status_code, error["code"]) == (404, "not_found")
    assert "/v1/responses" in error["message"]


async def test_another_sites_page_opens_none(engine: FakeEngine) -> None:
    """Without keys, a browser names the page's site, and the proxy refuses it."""
    with socket_proxy(engine) as proxy:
        page = {"origin": "http://evil.example"}
        assert await status_of(proxy, headers=page) == (403, "origin_not_allowed")
        own = {"origin": proxy.origin}
        async with proxy.socket(headers=own):
            pass


async def test_a_stop_ends_connections_after_their_answer(engine: FakeEngine) -> None:
    """One that is idle closes at once; one with an answer under way finishes it. What waits after
    it is refused, and the close says that the proxy goes away."""
    engine.answers.append(chat_stream(*["Hello"] * 5, pause_s=0.2))
    with socket_proxy(engine, shutdown_delay_s=0) as proxy:
        async with proxy.socket() as idle, proxy.socket() as ws:
            await ws.create()
            await ws.create("Second.")
            assert (await ws.event())["type"] == "response.created"
            proxy.server.leave()
            with pytest.raises(ConnectionClosed):
                await idle.event()
            late = await ws.event()
            while late["type"] != "error":
                late = await ws.event()
            rest = await ws.events()
            with pytest.raises(ConnectionClosed):
                await ws.event()
    assert (late["status"], late["error"]["code"]) == (503, "stopping")
    assert kinds(rest)[-1] == "response.completed"
    assert (idle.connection.close_code, ws.connection.close_code) == (1001, 1001)
    assert len(engine.bodies) == 1


@pytest.mark.parametrize(
    ("setting", "told"),
    [("websocket_idle_s", []), ("websocket_life_s", ["websocket_connection_limit_reached"])],
)
async def test_a_connection_has_an_end(engine: FakeEngine, setting: str, told: list[str]) -> None:
    """An idle one closes, and an old one after its answer, with the error that clients expect."""
    engine.answers.append(chat_stream(*["Hello"] * 4, pause_s=0.2))
    with socket_proxy(engine, **{setting: 0.4}) as proxy:
        async with proxy.socket() as ws:
            await ws.create()
            assert kinds(await ws.events())[-1] == "response.completed"
            codes = []
            with pytest.raises(ConnectionClosed):
                while True:
                    codes.append((await ws.event())["error"]["code"])
    assert codes == told
    assert ws.connection.close_code == 1000


async def test_the_time_limit_of_headers_ends_with_the_handshake(engine: FakeEngine) -> None:
    """An open connection may be silent for longer than a request's headers may take."""
    engine.answers.append(scripted())
    with socket_proxy(engine, header_timeout_s=0.2) as proxy:
        async with proxy.socket() as ws:
            await asyncio.sleep(0.6)
            assert await ws.ask()


@pytest.mark.parametrize(
    "handshake",
    [
        b"GET /v1/responses HTTP/1.1\r\nx-long: " + b"x" * 9000 + b"\r\n",
        b"POST /v1/responses HTTP/1.1\r\ncontent-length: 0\r\n",
        b"GET /v1/responses HTTP/1.1\r\n",
    ],
)
async def test_a_bad_handshake_is_answered(engine: FakeEngine, handshake: bytes) -> None:
    """Headers longer than the parser takes, another method, or no key of the protocol: the
    connection gets an answer and doesn't stay open."""
    upgrade = b"host: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n"
    with socket_proxy(engine) as proxy:
        reader, writer = await asyncio.open_connection(*proxy.address)
        writer.write(handshake + upgrade)
        async with asyncio.timeout(5):
            answer = await reader.readline()
        writer.close()
        await until(lambda: not proxy.server.server_state.connections)
    assert answer.startswith(b"HTTP/1.1 4"), answer[:80]


async def test_a_client_that_reads_nothing_is_cut_off(engine: FakeEngine) -> None:
    """After stall_timeout_s; the engine's stream ends with it."""
    engine.answers.append(chat_stream(*["x" * 400_000] * 25, hangs=True))
    with socket_proxy(engine, stall_timeout_s=0.5) as proxy:
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(proxy.address)
        async with proxy.socket(sock=raw, max_queue=1) as ws:
            await ws.create()
            # Pings would end it after 20 s.
            await until(lambda: engine.disconnects == 1, 15)
