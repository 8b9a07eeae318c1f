"""Routes besides the turns: proofs count like requests, and nothing is asked without a bound."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import httpx
import msgspec
import pytest
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.types import Receive, Send
from support.fake_engine import CAPABILITY, MODEL, Answer, FakeEngine, forgotten
from support.sockets import SocketProxy, socket_proxy, until

from leyline_engine.contract import PROVE_ACTION, Proof, ProofPlace, Receipt
from leyline_proxy.admission import FairPlaces
from leyline_proxy.errors import QueueFullError, QueueTimeoutError
from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings

RED, BLUE = "key-of-the-red-tenant", "key-of-the-blue-tenant"
KEYS = (f"red:{RED}", f"blue:{BLUE}")
PROOF = Proof(pending=False, doomed=1, digested=1, places=(ProofPlace(place="pool.tree"),))
BESIDE = {
    "/healthz": "a constant",
    "/readyz": "the state in memory",
    "/leyline/capability": "the state in memory",
    "/metrics": "Services.scrapes",
    "/": "a file in memory",
    "/live/{name}": "a file in memory",
    "/v1/leyline/live": "FeedLimits",
}
"""Routes without a tenant's place, and what bounds them."""


def proven(message_id: str) -> Receipt:
    """The receipt of a forget with a proof."""
    return msgspec.structs.replace(forgotten(message_id), proof=PROOF)


class Engine(FakeEngine):
    """Notes the tenants whose proofs it works for, and how many there are at a time."""

    def __init__(self) -> None:
        super().__init__(capability=msgspec.structs.replace(CAPABILITY, instance="a1"))
        self.receipt = proven
        self.began: list[str] = []
        self.most: Counter[str] = Counter()
        self._now: Counter[str] = Counter()
        self.free = asyncio.Event()

    async def complete(self, request: Request, receive: Receive, send: Send) -> None:
        """Answer once ``free`` is set, if the request asks for a proof."""
        actions = json.loads(await request.body())["custom_params"]["kv_hints"]["actions"]
        if not any(each["action_type"] == PROVE_ACTION for each in actions):
            await super().complete(request, receive, send)
            return
        scope = next(p["scope"] for each in actions if "scope" in (p := each["payload"]))
        self.began.append(scope)
        for name in (scope, "all"):
            self._now[name] += 1
            self.most[name] = max(self.most[name], self._now[name])
        try:
            while not self.free.is_set():  # noqa: ASYNC110 - set by another thread
                await asyncio.sleep(0.01)
            await super().complete(request, receive, send)
        finally:
            self._now.subtract((scope, "all"))


@asynccontextmanager
async def client(proxy: SocketProxy, key: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a tenant that has a session named s."""
    headers = {"authorization": f"Bearer {key}", "x-leyline-session": "s"}
    async with httpx.AsyncClient(base_url=proxy.origin, headers=headers, timeout=60) as http:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi."}]}
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
        yield http


def proof(http: httpx.AsyncClient) -> asyncio.Task[httpx.Response]:
    """A proof that is under way."""
    body = {"wait_s": 0}
    return asyncio.create_task(http.post("/v1/leyline/sessions/s/proof", json=body))


async def test_proofs_count_like_requests() -> None:
    """They use up the rate, wait for places, and are refused beyond them; by tenant."""
    engine = Engine()
    limits = {
        "red": {"requests_per_minute": 3},
        "blue": {"max_concurrent": 1, "max_queued": 1},
    }
    with socket_proxy(engine, api_keys=KEYS, tenants=limits) as proxy:
        async with client(proxy, RED) as red, client(proxy, BLUE) as blue:
            first = proof(blue)
            await until(lambda: engine.began == ["blue"])
            second = proof(blue)
            await until(lambda: proxy.services.gate._waiting["blue"] == 1)
            refused = await proof(blue)
            engine.free.set()
            assert (await first).status_code == (await second).status_code == 200
            answers = [await proof(red) for _ in range(3)]
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert answers[-1].json()["error"]["code"] == "rate_limit_exceeded"


async def test_an_engine_is_asked_for_few_proofs_at_once() -> None:
    """Two, one of them a tenant's: another tenant's single proof comes next after a burst."""
    engine = Engine()
    with socket_proxy(engine, api_keys=KEYS) as proxy:
        async with client(proxy, RED) as red, client(proxy, BLUE) as blue:
            burst = [proof(red) for _ in range(12)]
            await until(lambda: proxy.services.gate._running["red"] == 12)
            last = proof(blue)
            await until(lambda: "blue" in engine.began)
            assert engine.began == ["red", "blue"]
            engine.free.set()
            answers = await asyncio.gather(last, *burst)
    assert {answer.status_code for answer in answers} == {200}
    assert (engine.most["red"], engine.most["all"]) == (1, 2)
    assert len(engine.began) == 13


async def test_a_tenants_questions_leave_room_for_others() -> None:
    """While an engine leaves them unanswered, a tenant has eight under way and 64 that wait."""
    engine = FakeEngine()
    with socket_proxy(engine, api_keys=KEYS, shutdown_grace_s=1) as proxy:
        async with client(proxy, RED) as red, client(proxy, BLUE) as blue:
            engine.scripted["/v1/models"] = Answer(hangs=True)
            asked = [asyncio.create_task(red.get("/v1/models")) for _ in range(80)]
            done, waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            while len(done) < 8:
                more, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                done |= more
            codes = {each.result().json()["error"]["code"] for each in done}
            listed = await blue.get("/v1/leyline/sessions")
            for each in waiting:
                each.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
    assert codes == {"queue_full"} and len(waiting) == 72
    assert listed.status_code == 200


def routes() -> Iterator[APIRoute]:
    """All routes of a proxy."""
    app = create_app(Settings(upstream="http://engine", pass_through="all"))
    yield from (each for each in app.routes if isinstance(each, APIRoute))


def test_every_route_has_a_bound() -> None:
    """It runs as an exchange, holds one of the side routes' places, or is listed here."""
    found: dict[str, str] = {}
    for route in routes():
        calls = [each.call.__qualname__ for each in route.dependant.dependencies if each.call]
        if "side_caller.<locals>.caller" in calls:
            continue
        if "ServedBy(" in inspect.getsource(route.endpoint):
            continue
        found[route.path] = route.endpoint.__name__
    assert found.pop("/v1/responses") == "no_handshake"
    assert found.keys() == BESIDE.keys()


async def test_places_go_to_tenants_in_turn() -> None:
    """Beyond a tenant's share, its work waits; beyond that, it is refused. A wait has an end, and
    leaves no place taken."""
    places = FairPlaces(2, of_tenant=1, waiting=2, wait_s=0.05)
    order: list[str] = []

    async def work(name: str) -> None:
        async with places.place(name):
            order.append(name)
            await asyncio.sleep(0)

    async with places.place("a"), places.place("b"):
        waits = [asyncio.create_task(work(name)) for name in ("a", "a", "c")]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError):
            await work("a")
        ends = await asyncio.gather(*waits, return_exceptions=True)
        assert [type(each) for each in ends] == [QueueTimeoutError] * 3
    await asyncio.gather(*(work(name) for name in ("a", "a", "a", "c", "b")))
    assert order == ["a", "c", "b", "a", "a"]
