"""The failures that count against an engine, and its return to requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from contextlib import nullcontext as none
from socket import AF_INET, SOCK_STREAM, socket

import httpx
import pytest
from structlog.testing import capture_logs
from support.clock import Clock
from support.fake_engine import DONE, MODEL, Answer, FakeEngine, chunk, proxy_before
from support.replicas import replica_over
from support.waiting import until

from leyline_lab.stand_ins.serving import serving
from leyline_proxy.errors import UpstreamBusyError, UpstreamUnreachableError
from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings
from leyline_proxy.upstream.aiohttp_transport import AiohttpTransport
from leyline_proxy.upstream.breaker import Breaker, BreakerState
from leyline_proxy.upstream.client import UpstreamClient, chunks
from leyline_proxy.upstream.embedded import ASGIStreamTransport
from leyline_proxy.upstream.link import Link
from leyline_proxy.upstream.replica import Replica, replica_document

CHAT = "/v1/chat/completions"
REQUEST = {"model": MODEL, "messages": [{"role": "user", "content": "Hi."}]}
OPENING = chunk({"role": "assistant", "content": "Hel"})


@asynccontextmanager
async def replica_of(engine: FakeEngine, clock: Clock) -> AsyncIterator[Replica]:
    replica = replica_over(engine, breaker=Breaker(clock=clock))
    try:
        yield replica
    finally:
        await replica.client.aclose()


def streamed(*parts: bytes, breaks: bool = False, hangs: bool = False) -> Answer:
    return Answer(parts, content_type="text/event-stream", breaks=breaks, hangs=hangs)


async def stream(replica: Replica) -> None:
    content = b'{"model": "fake-model", "stream": true, "messages": []}'
    async with replica.forward("POST", CHAT, headers=(), content=content) as upstream:
        async for _ in chunks(upstream):
            pass


async def test_a_router_that_is_down_is_not_taken_for_its_engine() -> None:
    """Errors, the document for operators and the log name it, until a request reaches it."""
    engine, server = FakeEngine(), FakeEngine()
    replica = replica_over(engine)
    with socket(AF_INET, SOCK_STREAM) as unused, capture_logs() as logged:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        link = Link(url, AiohttpTransport(max_connections=1, socket=None, tls=None))
        replica.router = UpstreamClient(link, api_key=None, peer="router")
        for routed, expected in ((True, "router can't be reached"), (False, None)):
            opened = replica.forward("POST", CHAT, headers=(), content=b"{}", routed=routed)
            with pytest.raises(UpstreamUnreachableError, match=expected) if expected else none():
                async with opened:
                    pass
            assert "router can't be reached" in replica_document(replica)["router"]["problem"]
        await replica.router.aclose()
    through = Link("http://router", ASGIStreamTransport(server))
    replica.router = UpstreamClient(through, api_key=None, peer="router")
    with capture_logs() as later:
        async with replica.forward("POST", CHAT, headers=(), content=b"{}", routed=True):
            pass
    found = replica_document(replica)["router"]
    assert found == {"address": "http://router", "problem": None}
    assert [each["event"] for each in (*logged, *later)] == ["router_unreachable", "router_reached"]
    await replica.aclose()


async def test_a_router_without_a_free_connection_is_not_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is busy, and so is its client; nothing is known of a fault."""
    replica = replica_over(FakeEngine())
    link = Link("http://router", ASGIStreamTransport(FakeEngine()))
    router = replica.router = UpstreamClient(link, api_key=None, peer="router")

    @asynccontextmanager
    async def busy(*_: object, **__: object) -> AsyncIterator[httpx.Response]:
        raise UpstreamBusyError("All connections are in use.")
        yield

    monkeypatch.setattr(router, "open", busy)
    with pytest.raises(UpstreamBusyError):
        async with replica.forward("POST", CHAT, headers=(), content=b"{}", routed=True):
            pass
    assert replica.router_problem is None
    await replica.aclose()


@pytest.mark.parametrize("parts", [(), (OPENING,)])
async def test_streams_that_break_in_the_middle_open_the_circuit(parts: tuple[bytes, ...]) -> None:
    """A status line is no success yet: an engine that dies on every answer is passed over."""
    engine, clock = FakeEngine(), Clock()
    async with replica_of(engine, clock) as replica:
        for _ in range(3):
            assert replica.breaker.admits
            engine.answers = [streamed(*parts, breaks=True)]
            with pytest.raises(UpstreamUnreachableError):
                await stream(replica)
        assert replica.breaker.state is BreakerState.OPEN
        clock.now += 2.0
        engine.answers = [streamed(*parts, breaks=True)]
        with pytest.raises(UpstreamUnreachableError):
            await stream(replica)
        assert replica.breaker.state is BreakerState.OPEN
        clock.now += 2.0
        assert not replica.breaker.admits, "the failed trial doubles the pause"
        clock.now += 2.0
        engine.answers = [streamed(OPENING, DONE)]
        await stream(replica)
        assert replica.breaker.state is BreakerState.CLOSED


async def test_a_trial_that_streams_for_long_keeps_no_other_request_away() -> None:
    """An engine that answers again takes requests from the trial's first byte on."""
    engine, clock = FakeEngine(), Clock()
    async with replica_of(engine, clock) as replica:
        for _ in range(3):
            replica.breaker.failed()
        clock.now += 2.0
        engine.answers = [streamed(OPENING, hangs=True)]
        task = asyncio.create_task(stream(replica))
        await until(lambda: replica.breaker.state is BreakerState.CLOSED)
        assert replica.breaker.admits
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert replica.breaker.admits and replica.running == 0


def test_an_engine_with_all_its_connections_in_use_isnt_taken_for_dead() -> None:
    """Receipts and handshakes have connections of their own, and waiting for one is no failure."""
    engine = FakeEngine()
    with ExitStack() as stack:
        origin = stack.enter_context(serving(engine))
        settings = Settings(
            upstream=origin, max_upstream_connections=1, connect_timeout_s=0.2, log_level="error"
        )
        app = create_app(settings)
        proxy = stack.enter_context(serving(app))
        (replica,) = app.state.services.pool
        engine.answers = [streamed(OPENING, hangs=True)]
        with httpx.stream("POST", f"{proxy}{CHAT}", json={**REQUEST, "stream": True}) as answer:
            parts = answer.iter_raw()
            assert next(parts)
            for _ in range(4):
                busy = httpx.post(f"{proxy}{CHAT}", json=REQUEST)
                assert busy.status_code == 503
                assert busy.json()["error"]["code"] == "upstream_busy"
            assert httpx.get(f"{proxy}/v1/models").status_code == 200
            assert replica.breaker.state is BreakerState.CLOSED
            assert replica.status.up
        assert httpx.post(f"{proxy}{CHAT}", json=REQUEST).status_code == 200


async def test_an_answer_that_cannot_be_decoded_is_the_engines_failure() -> None:
    """A body that isn't in the encoding that its header names ends in a 502, as one that breaks
    off."""
    engine = FakeEngine()
    engine.answers.append(Answer([b"no gzip"], headers={"content-encoding": "gzip"}))
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi."}]}
    async with proxy_before(engine) as http:
        answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 502
