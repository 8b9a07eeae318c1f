"""The handshake's bookkeeping, before a scripted engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import msgspec
import pytest
from structlog.testing import capture_logs

from leyline_engine.contract import Capability, MismatchReason, Plugin
from leyline_proxy.telemetry.metrics import Metrics
from leyline_proxy.upstream.client import UpstreamClient
from leyline_proxy.upstream.handshake import Handshake
from leyline_proxy.upstream.link import Link

CAPABILITY = Capability(
    engine="fake",
    engine_version="1",
    model="m",
    model_fingerprint="f",
    architecture="None",
    vocab_size=8,
    max_context=8,
    splices=False,
    instance="one",
)


class Engine:
    """Answers the questions of a handshake; ``down`` refuses the connection."""

    def __init__(self) -> None:
        self.down = False
        self.silent = False
        self.capability = CAPABILITY
        self.asked: list[str] = []

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.url.path)
        await asyncio.sleep(0)
        if self.down:
            raise httpx.ConnectError("refused", request=request)
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        if self.silent:
            raise httpx.ReadTimeout("slow", request=request)
        if request.url.path == "/leyline/capability":
            return httpx.Response(200, content=msgspec.json.encode(self.capability))
        return httpx.Response(404)


@pytest.fixture
def engine() -> Engine:
    """An engine that is up and can't splice."""
    return Engine()


def handshake(
    engine: Callable[[httpx.Request], Coroutine[None, None, httpx.Response]],
) -> Handshake:
    """A handshake with ``engine``; the test closes nothing, as no socket is opened."""
    transport: Any = httpx.MockTransport(engine)
    upstream = UpstreamClient(Link("http://engine", transport), api_key=None)
    return Handshake(upstream, Metrics(), splice=True, interval_s=60, retry_s=60)


async def test_a_busy_engine_is_the_engine_it_was(engine: Engine) -> None:
    """One question that isn't answered in time takes nothing back, and is asked again soon."""
    shake = handshake(engine)
    before = await shake.refresh()
    engine.silent = True
    status = await shake.refresh()
    assert status.capability == before.capability == CAPABILITY
    assert (status.up, status.settled) == (True, False)


async def test_another_run_of_the_engine_retains_nothing_of_the_first(engine: Engine) -> None:
    """Model and run together name what is retained."""
    shake = handshake(engine)
    first = (await shake.refresh()).retains_as
    assert (await shake.refresh()).retains_as == first
    engine.capability = msgspec.structs.replace(CAPABILITY, instance="two")
    assert (await shake.refresh()).retains_as != first


async def test_an_engine_that_is_up_is_not_asked_before_a_turn(engine: Engine) -> None:
    """Known facts are enough."""
    shake = handshake(engine)
    await shake.refresh()
    engine.asked.clear()
    assert (await shake.current()).up
    assert not engine.asked


async def test_turns_that_wait_for_an_engine_share_a_question(engine: Engine) -> None:
    """Many turns at once ask about an engine that was down no more than twice."""
    shake = handshake(engine)
    engine.down = True
    await shake.refresh()
    engine.asked.clear()
    engine.down = False
    found = await asyncio.gather(*(shake.current() for _ in range(20)))
    assert all(status.up for status in found)
    assert engine.asked.count("/leyline/capability") <= 2


async def test_a_gateway_without_engines_serves_no_model() -> None:
    """An engine that answers the list of models with 502, 503 or 504 isn't up."""

    async def gateway(request: httpx.Request) -> httpx.Response:
        return httpx.Response(503)

    status = await handshake(gateway).refresh()
    assert not status.up and "503" in status.problem


async def test_versions_that_dont_fit_are_the_obstacle(engine: Engine) -> None:
    """The reason is in the status with its fix, claims are withheld, and an upgrade ends it."""
    shake = handshake(engine)
    takes = msgspec.structs.replace(CAPABILITY, actions=("leyline.claim@1.0",))
    engine.capability = msgspec.structs.replace(takes, plugin=Plugin(version="0.0.1"))
    with capture_logs() as logged:
        status = await shake.refresh()
    assert status.up and status.mismatch is not None
    assert status.mismatch.reason is MismatchReason.PLUGIN_TOO_OLD
    assert "0.0.1" in status.obstacle and "plugin_too_old" in status.obstacle
    assert status.fix.startswith("upgrade the plugin")
    assert not status.splices and not status.takes_claims
    (line,) = [entry for entry in logged if entry["event"] == "engine_status"]
    assert (line["mismatch"], line["fix"]) == ("plugin_too_old", status.fix)
    engine.capability = takes
    status = await shake.refresh()
    assert status.mismatch is None and status.takes_claims
