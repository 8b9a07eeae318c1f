"""Two workers of one proxy: a forget at one of them reaches the other's memories, over the hub."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.fake_engine import FakeEngine, forgotten
from support.hubs import hub
from support.process_search import Marker

from leyline_proxy.http.app import create_app
from leyline_proxy.hub.budgets import HubBudgets
from leyline_proxy.hub.feed import HubFeed
from leyline_proxy.hub.fleet import HubFleet
from leyline_proxy.hub.link import HubLink
from leyline_proxy.hub.places import HubPlaces
from leyline_proxy.hub.responses import HubResponses
from leyline_proxy.hub.server import Member
from leyline_proxy.hub.sessions import HubSessions
from leyline_proxy.settings import Settings
from leyline_proxy.upstream.embedded import ASGIStreamTransport, lifespan_of
from leyline_proxy.wiring.services import Services
from leyline_proxy.wiring.stores import build_response_shelf
from leyline_proxy.wiring.workers import Worker

LONG = "".join(f"line {number} of the listing\n" for number in range(60))

Serving = tuple[Services, httpx.AsyncClient]


@asynccontextmanager
async def workers(
    folder: Path, engine: FakeEngine
) -> AsyncIterator[tuple[HubSessions, Serving, Serving]]:
    """A hub's sessions and its two workers, each with a client."""
    settings = Settings(
        log_level="error", policy="truncate_older_than:n=1,max_chars=80", handshake_retry_s=0.05
    )
    feed, budgets = HubFeed(), HubBudgets()

    def joined(member: Member) -> None:
        feed.joined(member)
        budgets.joined(member)

    fleet = HubFleet(
        claims=dict, joined=joined, ready=lambda *_: None, gone=id, counted=lambda *_: None
    )
    sessions = HubSessions(max_sessions=9, max_bytes=1 << 24, ttl_s=60)
    parts = (
        feed,
        budgets,
        fleet,
        sessions,
        HubPlaces(9),
        HubResponses(build_response_shelf(settings)),
    )
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(hub(folder / "hub", *parts))
        found: list[Serving] = []
        for number in (0, 1):
            link = HubLink(folder / "hub", number, "a secret of the tests")
            app = create_app(settings, engine_app=engine, worker=Worker(link))
            await stack.enter_async_context(lifespan_of(app))
            client = httpx.AsyncClient(
                transport=ASGIStreamTransport(app), base_url="http://localhost"
            )
            found.append((app.state.services, await stack.enter_async_context(client)))
        yield sessions, found[0], found[1]


async def turn(client: httpx.AsyncClient, text: str, turns: int) -> None:
    """One turn of the session, whose first message is a text."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"{text} {LONG}"}]
    for number in range(turns):
        messages += [
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": f"Turn {number}."},
        ]
    body = {"model": "fake-model", "messages": messages}
    answer = await client.post(
        "/v1/chat/completions", json=body, headers={"x-leyline-session": "s"}
    )
    assert answer.status_code == 200, answer.text


@pytest.mark.nightly
async def test_a_forget_at_one_worker_empties_the_others_memories(tmp_path: Path) -> None:
    """Turns at both workers leave a text in both; after a proof at one only the hub's newest list
    has it, and after a turn without it no object of either has."""
    marker, engine = Marker(), FakeEngine()
    async with workers(tmp_path, engine) as (sessions, (one, asking), (other, serving)):
        for turns in range(4):
            await turn((asking, serving)[turns % 2], str(marker), turns)
        engine.bodies.clear()
        for services in (one, other):
            for name in ("bodies", "policies"):
                assert sum(services.kept.memories.memories[name].left("default", "s", 9)), name
        engine.receipt = forgotten
        answer = await asking.post("/v1/leyline/sessions/s/proof", json={"wait_s": 0.05})
        assert answer.status_code == 200, answer.text
        engine.bodies.clear()
        looked = [each["place"] for each in answer.json()["places"]]
        assert looked.count("bodies") == looked.count("policies") == 2
        assert not any(each["survivors"] for each in answer.json()["places"])
        for services in (one, other):
            for name, memory in services.kept.memories.memories.items():
                assert not sum(memory.left("default", "s", 9)), name
        stores = [sessions, one.store, other.store]
        assert marker.holders(below=stores) == set()
        await turn(serving, "Nothing.", 5)
        await turn(asking, "Nothing.", 6)
        engine.bodies.clear()
        assert marker.holders() == set()
