"""A proxy in front of engines whose versions don't fit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from support.fake_engine import CAPABILITY, MODEL, FakeEngine, tool_session

from leyline_engine.contract import CAPABILITY_PATH, Plugin, this_plugin
from leyline_lab.errors import ServerAnswerError, SubjectError
from leyline_lab.evaluation.endpoint import EngineEndpoint
from leyline_lab.outside.endpoint import ask_engine
from leyline_lab.stand_ins.serving import serving
from leyline_lab.three_arm.clients import GenerateClient
from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings
from leyline_proxy.upstream.embedded import create_embedded_engine


class OtherPlugin:
    """The embedded engine, as a plugin of other versions would describe it.

    Args:
        changes: members of its capability document; None stands for a member that is missing.
    """

    def __init__(self, replay: ASGIApp, /, **changes: Any) -> None:
        self._replay, self._changes = replay, changes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http" or scope["path"] != CAPABILITY_PATH:
            await self._replay(scope, receive, send)
            return
        held: list[Message] = []

        async def hold(message: Message) -> None:
            held.append(message)

        await self._replay(scope, receive, hold)
        document = json.loads(b"".join(m.get("body", b"") for m in held)) | self._changes
        given = {name: value for name, value in document.items() if value is not None}
        await send(held[0] | {"headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": msgspec.json.encode(given)})


def play(**changes: Any) -> tuple[dict[str, Any], list[httpx.Response]]:
    """The engine's state in /readyz, and the answers to four turns of an agent, of which the last
    two edit."""
    settings = Settings(
        policy="truncate_older_than:n=2,max_chars=80", edit_timing="now", log_level="error"
    )
    replay = create_embedded_engine("replay", {"pool_tokens": 16_384, "device": "cpu"})
    try:
        with serving(create_app(settings, engine_app=OtherPlugin(replay, **changes))) as origin:
            model = httpx.get(f"{origin}/v1/models").json()["data"][0]["id"]
            answers = [
                httpx.post(
                    f"{origin}/v1/chat/completions",
                    json={"model": model, "messages": tool_session(turns), "max_tokens": 2},
                    headers={"x-leyline-session": "one"},
                    timeout=60,
                )
                for turns in (1, 2, 3, 4)
            ]
            (state,) = httpx.get(f"{origin}/readyz").json()["upstreams"]
    finally:
        replay.state.shutdown()
    return state, answers


@pytest.mark.parametrize(
    ("changes", "reason", "named"),
    [
        ({"plugin": Plugin(version="0.0.9")}, "plugin_too_old", "0.0.9"),
        ({"plugin": Plugin(version="99.0", proxies=">=98.1")}, "proxy_too_old", ">=98.1"),
        ({"engine": "sglang", "engine_version": "sglang 0.4.1"}, "engine_untested", "0.4.1"),
    ],
)
def test_where_versions_dont_fit_edits_are_prefilled(
    changes: dict[str, Any], reason: str, named: str
) -> None:
    """Every request is answered; /readyz and the accounts name the versions."""
    state, answers = play(**changes)
    assert (state["up"], state["splices"], state["mismatch"]) == (True, False, reason)
    assert named in state["obstacle"] and state["fix"]
    accounts = [answer.json()["leyline"] for answer in answers]
    assert {answer.status_code for answer in answers} == {200}
    assert [account["outcome"] for account in accounts[2:]] == ["reprefilled"] * 2
    assert all(reason in account["detail"] for account in accounts[2:])
    assert all(account["tokens"]["spliced"] == 0 for account in accounts)


@pytest.mark.parametrize("plugin", [this_plugin(), Plugin(version="99.0", proxies=">=0.1"), None])
def test_where_versions_fit_edits_are_spliced(plugin: Plugin | None) -> None:
    """The same session splices with this plugin, a newer one, and one that states no version."""
    state, answers = play(plugin=plugin)
    assert (state["splices"], state["mismatch"]) == (True, "")
    assert all(answer.json()["leyline"]["tokens"]["spliced"] > 0 for answer in answers[2:])


@pytest.fixture(scope="module")
def outdated() -> Iterator[str]:
    """The address of an engine whose plugin is too old."""
    plugin = Plugin(version="0.0.1")
    with serving(FakeEngine(capability=msgspec.structs.replace(CAPABILITY, plugin=plugin))) as url:
        yield url


async def test_a_benchmark_ends_with_the_handshakes_reason(outdated: str) -> None:
    """It measures no engine that gets no edits in production, and names versions and fix."""
    client = GenerateClient(outdated)
    try:
        with pytest.raises(ServerAnswerError, match=r"0\.0\.1.*plugin_too_old.*upgrade"):
            await client.capability()
    finally:
        await client.close()


def test_an_outside_benchmark_notes_the_reason(outdated: str) -> None:
    """The engine counts as one that doesn't splice."""
    engine = ask_engine(outdated, MODEL)
    assert not engine.splices and "plugin_too_old" in engine.obstacle


def test_an_evaluation_ends_with_the_reason(outdated: str) -> None:
    """It measures no splices on an engine that would get no edits."""
    with (
        EngineEndpoint(outdated) as engine,
        pytest.raises(SubjectError, match="plugin_too_old"),
    ):
        engine.capability()
