"""Engines that fail in the middle, are busy or slow, and whom that concerns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

import httpx
import pytest
from support.claims_engine import ClaimsEngine
from support.fake_engine import DONE, MODEL, Answer, FakeEngine, chunk, proxy_before
from support.stack import serving

from leyline_proxy.apis.responses.native import NativeResponses
from leyline_proxy.errors import ProxyError, UpstreamUnreachableError
from leyline_proxy.http.app import create_app
from leyline_proxy.http.models import model_list
from leyline_proxy.model.session import Place, Session
from leyline_proxy.settings import Settings, TenantSettings
from leyline_proxy.telemetry.metrics import Metrics
from leyline_proxy.turns.writing import SessionMovedError, _asking
from leyline_proxy.upstream.asgi_transport import ASGIStreamTransport
from leyline_proxy.upstream.breaker import Breaker, BreakerState
from leyline_proxy.upstream.client import UpstreamClient, chunks
from leyline_proxy.upstream.handshake import Handshake
from leyline_proxy.upstream.link import Link
from leyline_proxy.upstream.replica import Replica
from leyline_proxy.wiring.upstreams import build_pool

CHAT = "/v1/chat/completions"
REQUEST = {"model": MODEL, "messages": [{"role": "user", "content": "Hi."}]}
OPENING = chunk({"role": "assistant", "content": "Hel"})


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def replica_of(engine: FakeEngine, clock: Clock) -> AsyncIterator[Replica]:
    client = UpstreamClient(Link("http://e", ASGIStreamTransport(engine)), api_key=None)
    shake = Handshake(client, Metrics(), name="e", splice=True, interval_s=60, retry_s=60)
    try:
        yield Replica("e", client, shake, Breaker(clock=clock))
    finally:
        await client.aclose()


def streamed(*parts: bytes, breaks: bool = False, hangs: bool = False) -> Answer:
    return Answer(parts, content_type="text/event-stream", breaks=breaks, hangs=hangs)


async def stream(replica: Replica) -> None:
    content = b'{"model": "fake-model", "stream": true, "messages": []}'
    async with replica.forward("POST", CHAT, headers=(), content=content) as upstream:
        async for _ in chunks(upstream):
            pass


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
        async with asyncio.timeout(5):
            while replica.breaker.state is not BreakerState.CLOSED:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.01)
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


async def test_a_list_of_models_doesnt_wait_for_an_engine_that_hangs() -> None:
    """An engine that is known to be down isn't asked while another is up."""

    async def hangs(scope: object, receive: object, send: object) -> None:
        await asyncio.Event().wait()

    engine = FakeEngine()
    with ExitStack() as stack:
        up = stack.enter_context(serving(engine))
        down = "http://127.0.0.1:9"
        pool = build_pool(Settings(upstreams={"a": down, "b": up}), None, Metrics())
        await pool.refresh()
        first = pool.get("a")
        assert first is not None
        first.client._link = Link(down, ASGIStreamTransport(hangs))  # type: ignore[arg-type]
        async with asyncio.timeout(5):
            answer = await model_list(pool, None, ())
        assert MODEL.encode() in bytes(answer.body)
        with pytest.raises(ProxyError) as refused:
            await model_list(pool, frozenset(), ())
        assert refused.value.code == "no_upstream"
        await pool.aclose()


async def test_the_affinity_header_is_the_proxys_alone() -> None:
    """A client that sends it itself chooses no worker behind the router."""
    engine = FakeEngine()
    async with proxy_before(engine, affinity_header="X-Route", log_level="error") as client:
        for path, body in ((CHAT, REQUEST), ("/v1/completions", {"model": MODEL, "prompt": "a"})):
            await client.post(
                path, json=body, headers={"x-route": "forged", "x-leyline-session": "mine"}
            )
    sent = [[v for name, v in raw if name == b"x-route"] for raw in engine.raw_headers]
    assert sent == [[b"mine"], []]


async def test_a_gateway_without_engines_serves_no_model() -> None:
    """What answers the list of models with 502, 503 or 504 isn't up."""

    async def gateway(scope: object, receive: object, send: object) -> None:
        await send({"type": "http.response.start", "status": 503, "headers": []})  # type: ignore[operator]
        await send({"type": "http.response.body", "body": b""})  # type: ignore[operator]

    async with replica_of(gateway, Clock()) as replica:  # type: ignore[arg-type]
        status = await replica.handshake.refresh()
    assert not status.up and "503" in status.problem


def test_claims_stay_with_the_engines_of_their_tenant() -> None:
    """No command about them reaches an engine that isn't the tenant's, not even to list them."""
    engines = {"a": ClaimsEngine(), "b": ClaimsEngine()}
    with ExitStack() as stack:
        origins = {name: stack.enter_context(serving(e)) for name, e in engines.items()}
        red = TenantSettings(api_keys=("r",), upstreams=("a",))  # type: ignore[arg-type]
        settings = Settings(upstreams=origins, tenants={"red": red}, log_level="error")
        proxy = stack.enter_context(serving(create_app(settings)))
        client = stack.enter_context(httpx.Client(base_url=proxy))
        client.headers["authorization"] = "Bearer r"
        for number in range(4):
            client.post(CHAT, json=REQUEST, headers={"x-leyline-session": f"s{number}"})
            claim = {"session": f"s{number}", "kind": "soft", "predicate": {"messages": [0, 1]}}
            assert client.post("/v1/leyline/claims", json=claim).status_code == 201
        assert len(client.get("/v1/leyline/claims").json()["claims"]) == 4
        assert client.get("/v1/leyline/claims/c-none").status_code == 404
    assert {getattr(each, "tenant", None) or None for each in engines["b"].commands} <= {None}


@pytest.mark.parametrize(
    "item", [{"type": "item_reference", "id": "msg_1"}, {"id": "msg_1"}, {"type": None, "id": "x"}]
)
def test_a_reference_to_what_is_stored_isnt_the_upstreams_to_resolve(item: dict[str, str]) -> None:
    """It would find there what any tenant stored."""
    assert not NativeResponses().passes({"store": False, "input": [item]})
    message = {"role": "user", "content": "Hi", "id": "msg_2"}
    assert NativeResponses().passes({"store": False, "input": [message]})


@pytest.mark.parametrize("places", [{}, {"r1": Place("a", owed=True)}])
def test_a_policys_question_isnt_put_behind_a_forget(places: dict[str, Place]) -> None:
    """An engine that has been made to forget a session, or is to be, is given nothing of it."""
    session = Session("s", "red", "", (), (), 1, 0.0, places=places)
    with pytest.raises(SessionMovedError):
        _asking(session, "r1", told=True)
    assert _asking(session, "", told=False).unnamed == 1, (
        "an engine that retains nothing may be asked"
    )


async def test_an_answer_that_cannot_be_decoded_is_the_engines_failure() -> None:
    """A body that isn't in the encoding that its header names ends in a 502, as one that breaks
    off."""
    engine = FakeEngine()
    engine.answers.append(Answer([b"no gzip"], headers={"content-encoding": "gzip"}))
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi."}]}
    async with proxy_before(engine) as http:
        answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 502
