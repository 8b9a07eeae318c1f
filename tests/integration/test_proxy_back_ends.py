"""Back ends of every kind: plain, odd, restarted, and with a renderer of their own."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from support.fake_engine import (
    CAPABILITY,
    LONG,
    MODEL,
    Answer,
    FakeEngine,
    proxy_before,
    tool_session,
)

from leyline_engine.contract import CAPABILITY_PATH, RENDERER_PATH
from leyline_lab.stand_ins.serving import serving
from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings
from leyline_proxy.telemetry.metrics import Metrics
from leyline_proxy.upstream.client import UpstreamClient
from leyline_proxy.upstream.embedded import ASGIStreamTransport, create_embedded_engine
from leyline_proxy.upstream.handshake import Handshake
from leyline_proxy.upstream.link import Link

CHAT = "/v1/chat/completions"
POLICY = "truncate_older_than:n=2,max_chars=80"

ODD_ANSWERS = {
    "method not allowed": Answer([b"{}"], status=405),
    "server error": Answer([b"oops"], status=500, content_type="text/plain"),
    "page": Answer([b"<html>Welcome</html>"], content_type="text/html"),
    "other document": Answer([b'{"engine": 1}']),
    "redirect": Answer(status=302, headers={"location": "/login"}),
    "key refused": Answer([b"{}"], status=401),
    "broken off": Answer([b"{"], breaks=True),
}


class OddServer(FakeEngine):
    """An OpenAI-compatible server with its own idea of paths that it doesn't know."""

    def __init__(self, odd: Answer, *paths: str) -> None:
        super().__init__(capability=None)
        self.odd, self.paths = odd, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "http" and scope["path"].startswith(self.paths):
            await self._answer(self.odd, receive, send)
        else:
            await super().__call__(scope, receive, send)


def body(turns: int, model: str = MODEL, **members: Any) -> dict[str, Any]:
    """A turn of that agent."""
    return {"model": model, "messages": tool_session(turns), "max_tokens": 2, **members}


@pytest.mark.parametrize("odd", ODD_ANSWERS.values(), ids=ODD_ANSWERS)
async def test_odd_servers_are_plain_back_ends(odd: Answer) -> None:
    """They are ready, whatever they answer about Leyline, and get the caller's bytes alone."""
    engine = OddServer(odd, "/leyline", "/tokenize")
    raw = json.dumps(body(1)).encode()
    async with proxy_before(engine) as client:
        upstream = (await client.get("/readyz")).json()["upstreams"][0]
        answer = await client.post(CHAT, content=raw)
    assert (upstream["up"], upstream["engine"], upstream["splices"]) == (True, "plain", False)
    assert "capability" in upstream["obstacle"]
    assert answer.status_code == 200
    assert engine.bodies == [raw]


async def test_a_server_that_lists_no_models_serves_them_all() -> None:
    """Without a list nothing is refused here, and the metric says so under ``unknown``."""
    engine = OddServer(Answer([b"no"], status=500), "/v1/models", "/leyline")
    async with proxy_before(engine) as client:
        answer = await client.post(CHAT, json=body(1, model="whatever"))
        metrics = (await client.get("/metrics")).text
    assert answer.status_code == 200
    assert 'leyline_engine_splices{engine="plain",model="unknown",upstream="engine"} 0.0' in metrics


async def test_policies_work_before_a_plain_back_end_and_the_account_is_honest() -> None:
    """The edit reaches the server, and the caller learns that nothing was spliced, and why."""
    engine = FakeEngine(capability=None)
    headers = {"x-leyline-session": "plain"}
    async with proxy_before(engine, policy=POLICY, edit_timing="now") as client:
        accounts = [
            (await client.post(CHAT, json=body(turn), headers=headers)).json()["leyline"]
            for turn in (1, 2, 3, 3)
        ]
    assert len(engine.sent["messages"][2]["content"]) < len(LONG)
    assert "custom_params" not in engine.sent
    edited = accounts[2]
    assert (edited["outcome"], edited["reason"]) == ("reprefilled", "unsupported_runtime")
    assert "capability document" in edited["detail"]
    assert [edit["cause"] for edit in edited["edits"]] == ["policy:truncate_older_than"]
    assert edited["tokens"]["spliced"] == 0
    assert [accounts[at]["outcome"] for at in (0, 1, 3)] == ["unedited", "unedited", "edited"]
    assert accounts[3]["reason"] == "standing"


async def test_edits_wait_before_a_plain_back_end_until_they_pay() -> None:
    """An edit that reclaims little is held and noted; one that pays by now is sent with all that
    waited."""
    engine = FakeEngine(capability=None)
    headers = {"x-leyline-session": "waits"}
    accounts, sizes = [], []
    async with proxy_before(engine, policy=POLICY, edit_carry=0.05) as client:
        for turn in range(1, 30):
            answer = await client.post(CHAT, json=body(turn), headers=headers)
            accounts.append(answer.json()["leyline"])
            sizes.append(len(engine.sent["messages"][2]["content"]))
    held = [any(n["kind"] == "edits_held" for n in a["policy_notes"]) for a in accounts]
    edits = [len(account["edits"]) for account in accounts]
    first = next(turn for turn, count in enumerate(edits) if count)
    assert sizes[0] >= len(LONG) > sizes[-1]
    assert all(held[2:first]) and first > 3 and edits[first] > 1
    assert not any(wait and sent for wait, sent in zip(held, edits, strict=True))


async def test_a_server_that_never_answers_about_leyline_is_plain() -> None:
    """The question is given up in time, and the server is up for all else."""
    engine = OddServer(Answer(hangs=True), "/leyline")
    link = Link("http://e", ASGIStreamTransport(engine))
    client = UpstreamClient(link, api_key=None, small_timeout_s=0.2)
    shake = Handshake(client, Metrics(), splice=True, interval_s=60, retry_s=60)
    status = await shake.refresh()
    assert (status.up, status.engine, status.settled) == (True, "plain", False)


async def test_an_engine_that_is_not_ready_yet_is_asked_again_soon() -> None:
    """A 503 means that the engine will say later what it can do."""
    engine = OddServer(Answer([b"{}"], status=503), CAPABILITY_PATH)
    async with proxy_before(engine, handshake_interval_s=60.0) as client:
        first = (await client.get("/readyz")).json()["upstreams"][0]
        engine.paths, engine.capability = ("/nowhere",), CAPABILITY
        for _ in range(500):
            if (await client.get("/readyz")).json()["upstreams"][0]["engine"] == "fake":
                break
            await asyncio.sleep(0.02)
        last = (await client.get("/readyz")).json()["upstreams"][0]
    assert (first["engine"], first["up"], last["engine"]) == ("plain", True, "fake")
    assert "hasn't said yet" in first["obstacle"]


class Switch:
    """An address whose engine changes, as at a restart."""

    def __init__(self, engine: ASGIApp) -> None:
        self.engine: ASGIApp | None = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            raise NotImplementedError(scope["type"])
        if self.engine is None:
            raise ConnectionError("nobody is here")
        await self.engine(scope, receive, send)


@contextmanager
def replay_engine(**options: Any) -> Iterator[Any]:
    """A small embedded engine."""
    options = {"pool_tokens": 16_384, "device": "cpu"} | options
    engine = create_embedded_engine("replay", options)
    try:
        yield engine
    finally:
        engine.state.shutdown()


class Agent:
    """Sends the turns of one session."""

    def __init__(self, origin: str) -> None:
        self._origin = origin
        self.model = httpx.get(f"{origin}/v1/models").json()["data"][0]["id"]

    def turn(self, turns: int, **members: Any) -> dict[str, Any]:
        """The account of the turn with so many results."""
        headers = {"x-leyline-session": "one"}
        request = body(turns, self.model, **members)
        answer = httpx.post(f"{self._origin}{CHAT}", json=request, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        account: dict[str, Any] = answer.json()["leyline"]
        return account

    def upstream(self) -> dict[str, Any]:
        """The engine's status in ``/readyz``."""
        found: dict[str, Any] = httpx.get(f"{self._origin}/readyz").json()["upstreams"][0]
        return found


def test_a_session_goes_on_over_a_restart_of_the_engine() -> None:
    """The new run holds nothing of the old one: one ordinary prefill that says so, then splices."""
    with replay_engine() as first, replay_engine() as second:
        switch = Switch(first)
        settings = Settings(policy=POLICY, handshake_interval_s=60.0, log_level="error")
        with serving(create_app(settings, engine_app=switch)) as origin:
            agent = Agent(origin)
            before = [agent.turn(turns) for turns in (1, 2, 3)]
            switch.engine = second  # unnoticed: nothing was asked meanwhile
            after = [agent.turn(turns) for turns in (4, 5, 6)]
    assert before[-1]["reason"] == "spliced"
    assert (after[0]["outcome"], after[0]["reason"]) == ("reprefilled", "missing_source")
    assert after[0]["tokens"]["spliced"] == 0
    assert after[-1]["reason"] == "spliced"


@pytest.mark.parametrize("adapted", ["red", {"lora_path": "red"}])
def test_turns_of_an_adapter_draw_on_its_own(adapted: str | dict[str, str]) -> None:
    """The first turn of another adapter finds no source, wherever it is named; later ones do."""
    with replay_engine() as engine:
        settings = Settings(policy=POLICY, log_level="error")
        with serving(create_app(settings, engine_app=AnyAdapter(engine))) as origin:
            agent = Agent(origin)
            base = agent.model
            members = adapted if isinstance(adapted, dict) else {}
            accounts = [agent.turn(turns) for turns in (1, 2, 3)]
            agent.model = base if members else f"{base}:{adapted}"
            accounts += [agent.turn(turns, **members) for turns in (4, 5)]
            agent.model = base
            accounts.append(agent.turn(6))
    reasons = [account["reason"] for account in accounts]
    assert reasons[2:] == ["spliced", "missing_source", "spliced", "spliced"]
    assert accounts[3]["tokens"]["spliced"] == 0


class AnyAdapter:
    """An engine that takes any adapter's name, and serves its model."""

    def __init__(self, engine: ASGIApp) -> None:
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""

        async def of_the_model() -> Message:
            message = await receive()
            body = message.get("body", b"")
            return message | {"body": body.replace(b':red"', b'"')} if body else message

        if scope["type"] == "http":
            named = (b"content-length",)
            headers = [pair for pair in scope["headers"] if pair[0] not in named]
            scope = {**scope, "headers": headers}
        await self._engine(scope, of_the_model, send)


def test_an_engine_that_comes_back_and_does_not_splice_serves_the_session() -> None:
    """Its first receipt tells the proxy to ask again; turns are prefilled, the refusal is named."""
    with replay_engine() as first, replay_engine(splicing=False) as second:
        switch = Switch(first)
        settings = Settings(policy=POLICY, handshake_interval_s=3600.0, log_level="error")
        with serving(create_app(settings, engine_app=switch)) as origin:
            agent = Agent(origin)
            before = [agent.turn(turns) for turns in (1, 2, 3)]
            switch.engine = second  # unnoticed: nothing was asked meanwhile
            after = [agent.turn(4)]
            for _ in range(500):
                if not agent.upstream()["splices"]:
                    break
                time.sleep(0.02)
            after += [agent.turn(turns) for turns in (5, 6)]
            upstream = agent.upstream()
    assert before[-1]["reason"] == "spliced"
    assert (after[0]["outcome"], after[0]["reason"]) == ("reprefilled", "unsupported_runtime")
    assert all(account["tokens"]["spliced"] == 0 for account in after)
    assert (upstream["engine"], upstream["splices"]) == ("replay", False)
    assert upstream["obstacle"] == "switched off by configuration"


def test_an_engine_that_comes_back_without_the_plugin_gets_no_envelope() -> None:
    """While it was away nothing is known, so it is asked before the first turn is sent."""
    plain = FakeEngine(capability=None)
    with replay_engine() as first:
        switch = Switch(first)
        settings = Settings(policy=POLICY, handshake_retry_s=60.0, log_level="error")
        with serving(create_app(settings, engine_app=switch)) as origin:
            agent = Agent(origin)
            plain.models = [agent.model]
            agent.turn(2)
            switch.engine = None
            gone = httpx.post(f"{origin}{CHAT}", json=body(2, agent.model))
            for _ in range(500):
                if not agent.upstream()["up"]:
                    break
                time.sleep(0.02)
            switch.engine = plain
            account = agent.turn(3)
            upstream = agent.upstream()
    assert gone.status_code == 502
    assert "custom_params" not in plain.sent
    assert (account["outcome"], account["reason"]) == ("reprefilled", "unsupported_runtime")
    assert (upstream["engine"], upstream["splices"]) == ("plain", False)


class OwnRenderer:
    """An engine whose renderer document isn't what it renders with."""

    def __init__(self, engine: ASGIApp) -> None:
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http" or scope["path"] != RENDERER_PATH:
            await self._engine(scope, receive, send)
            return
        held: list[Message] = []

        async def hold(message: Message) -> None:
            held.append(message)

        await self._engine(scope, receive, hold)
        document = json.loads(b"".join(m.get("body", b"") for m in held))
        document["chat_template"] = "{{ messages }}"
        await send(held[0] | {"headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": json.dumps(document).encode()})


def test_where_the_proof_fails_the_engines_own_tokens_are_spliced() -> None:
    """Each turn asks for its tokens; contents are found in them, and edits spliced as ever."""
    with replay_engine() as engine:
        settings = Settings(policy=POLICY, log_level="error")
        with serving(create_app(settings, engine_app=OwnRenderer(engine))) as origin:
            agent = Agent(origin)
            upstream = agent.upstream()
            accounts = [agent.turn(turns) for turns in (1, 2, 3, 4)]
    assert (upstream["rendering"], upstream["splices"]) == ("engine", True)
    assert "probe conversation 0" in upstream["rendering_problem"]
    assert [account["reason"] for account in accounts[2:]] == ["spliced", "spliced"]
    assert all(account["tokens"]["spliced"] > 0 for account in accounts[2:])
