"""A policy that removes secrets fails: the client's answer, and nothing for the engine."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from support.claims_engine import ClaimsEngine
from support.fake_engine import MODEL, FakeEngine, forgotten, proxy_before
from support.messages_route import COUNT, MESSAGES
from support.responses_route import RESPONSES

from leyline_policies import Message, function_policy

CHAT = "/v1/chat/completions"
SECRET = "sk-ant-" + "api03-" + "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7bC0eF"
USER = {"role": "user", "content": f"my key is {SECRET}"}
TALK = {"model": MODEL, "messages": [USER], "max_tokens": 5}
GIVEN = {"model": MODEL, "input": USER["content"]}
ROUTES = [
    (CHAT, TALK),
    (CHAT, {**TALK, "stream": True}),
    (MESSAGES, TALK),
    (MESSAGES, {**TALK, "stream": True}),
    (RESPONSES, GIVEN),
    (RESPONSES, {**GIVEN, "stream": True}),
    ("/v1/leyline/count_tokens", TALK),
    (COUNT, TALK),
    ("/v1/responses/input_tokens", GIVEN),
]
SLOW = "redact:pattern='(?=a)(a|aa)+$'"
"""RE2 knows no lookahead, so a pattern of the operator's that backtracks without end."""


@function_policy(name="hides", mode="forget")
def hides(messages: list[Message], turn_idx: int) -> list[Message]:
    """Fail."""
    raise RuntimeError(f"secret words of {messages}")


@pytest.fixture
def hiding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy that is configured forgets and fails."""
    monkeypatch.setattr("leyline_proxy.tenants.tenant.load_pipeline", lambda _: (hides,))


class Counting(ClaimsEngine):
    """An engine whose tokens only it can count; it keeps what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    async def _tokenize(self, request: Request) -> Response:
        self.asked.append((await request.body()).decode())
        return JSONResponse({"tokens": [1, 2, 3]})


@pytest.mark.usefixtures("hiding")
@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_nothing_is_sent_and_the_client_is_told_why(path: str, body: dict[str, Any]) -> None:
    """The answer, on every route and in the shape of its API, has a status, a code, and the
    policy's name."""
    engine = FakeEngine()
    async with proxy_before(engine, policy="patched", log_level="error") as client:
        answer = await client.post(path, json=body)
        metrics = (await client.get("/metrics")).text
    assert answer.status_code == 502
    assert answer.headers["x-should-retry"] == "false"
    found = answer.json()
    error = found["error"] | found.get("leyline", {})
    assert (error["code"], error["param"]) == ("policy_failed_closed", "hides")
    assert error["policy_faults"] == [{"policy": "hides", "fault": "raised"}]
    assert "on_fault: skip" in error["message"]
    assert "secret words" not in answer.text
    assert SECRET not in answer.text
    assert engine.bodies == []
    assert 'leyline_policy_refusals_total{fault="raised",policy="hides"} 1.0' in metrics
    assert "leyline_policy_faults_total{" not in metrics


@pytest.mark.usefixtures("hiding")
async def test_the_operator_may_have_it_sent_all_the_same() -> None:
    """With ``on_fault: skip`` the request continues unchanged, and receipt and metric say so."""
    engine = FakeEngine()
    async with proxy_before(engine, policy="patched", on_fault="skip", log_level="error") as client:
        answer = await client.post(CHAT, json=TALK)
        metrics = (await client.get("/metrics")).text
    assert answer.status_code == 200
    faults = answer.json()["leyline"]["policy_faults"]
    assert faults == [{"policy": "hides", "fault": "raised"}]
    assert SECRET in str(engine.sent)
    assert 'leyline_policy_faults_total{fault="raised",policy="hides"} 1.0' in metrics
    assert "leyline_policy_refusals_total{" not in metrics


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_output_does_not_switch_a_redaction_off(stream: bool) -> None:
    """A message redacted on the first turn is redacted on the second, whatever came between, and is
    sent in the same words."""
    engine = FakeEngine()
    engine.receipt = forgotten
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    pem = "-----BEGIN PRIVATE KEY-----"
    async with proxy_before(engine, policy="redact:detectors=[keys]") as client:
        for hostile in (pem + "\\" * 16_000, f"x{pem}\n" * 4_000):
            first = await client.post(CHAT, json={**TALK, "stream": stream})
            assert first.status_code == 200
            said = engine.sent["messages"][0]
            result = {"role": "tool", "tool_call_id": "c", "content": f"{hostile} {SECRET}"}
            talk = {**TALK, "messages": [USER, asked, result], "stream": stream}
            second = await client.post(CHAT, json=talk)
            assert second.status_code == 200
            assert SECRET not in engine.bodies[-1].decode()
            assert engine.sent["messages"][0] == said == {**USER, "content": "my key is [redacted]"}


async def test_a_pattern_of_the_users_that_takes_too_long_withholds_the_message() -> None:
    """The pattern is the operator's; the text is anybody's. Asked to fail, it refuses."""
    engine = FakeEngine()
    hostile = {**TALK, "messages": [{"role": "user", "content": "a" * 60 + f"b {SECRET}"}]}
    async with proxy_before(engine, policy=SLOW) as client:
        assert (await client.post(CHAT, json=hostile)).status_code == 200
        assert engine.sent["messages"] == [{"role": "user", "content": "[redacted]"}]
    async with proxy_before(engine, policy=f"{SLOW},on_timeout=fail") as client:
        refused = await client.post(CHAT, json=hostile)
        assert refused.json()["error"]["code"] == "policy_failed_closed"
    async with proxy_before(engine, policy=f"{SLOW},on_timeout=fail,on_fault=skip") as client:
        assert (await client.post(CHAT, json=hostile)).status_code == 200
    assert len(engine.bodies) == 2
    assert SECRET in engine.bodies[1].decode()


async def test_a_session_goes_on_after_a_refusal() -> None:
    """The turn that wasn't sent is none of the session's."""
    engine = FakeEngine()
    headers = {"x-leyline-session": "kept"}
    hostile = [{"role": "user", "content": "a" * 60 + "b"}]
    async with proxy_before(engine, policy=f"{SLOW},on_timeout=fail") as client:
        await client.post(CHAT, json=TALK, headers=headers)
        refused = await client.post(CHAT, json={**TALK, "messages": hostile}, headers=headers)
        assert refused.status_code == 502
        after = await client.post(CHAT, json=TALK, headers=headers)
    assert after.json()["leyline"]["turn_index"] == 1


@pytest.mark.parametrize(("path", "body"), ROUTES[-3:])
async def test_to_count_tokens_no_secret_is_shown_to_the_engine(
    path: str, body: dict[str, Any]
) -> None:
    """Before the edits means before those that only tidy up."""
    engine = Counting()
    policy = "redact:detectors=[keys] | truncate_older_than:n=1"
    async with proxy_before(engine, policy=policy) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["input_tokens"] == 3
    assert "[redacted]" in engine.asked[-1]
    assert SECRET not in "".join(engine.asked)


async def test_calls_that_hang_cost_no_other_tenant_its_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This holds for any number of the red tenant's; until they end, its own requests are refused
    at once."""
    release = threading.Event()

    @function_policy(name="hangs", mode="forget")
    def hangs(messages: list[Message], turn_idx: int) -> list[Message]:
        if "hang" in messages[0]["content"]:
            release.wait()  # which no exception interrupts
        return messages

    monkeypatch.setattr("leyline_proxy.tenants.tenant.load_pipeline", lambda _: (hangs,))
    engine = FakeEngine()
    keys = tuple(f"{tenant}:{tenant}-key" for tenant in ("red", "blue"))
    hanging = {**TALK, "messages": [{"role": "user", "content": "hang"}]}
    settings: dict[str, Any] = {"policy": "patched", "policy_timeout_s": 0.02, "api_keys": keys}
    try:
        async with proxy_before(engine, log_level="error", **settings) as client:

            async def ask(tenant: str, body: dict[str, Any]) -> int:
                headers = {"authorization": f"Bearer {tenant}-key"}
                return (await client.post(CHAT, json=body, headers=headers)).status_code

            assert [await ask("red", hanging) for _ in range(4)] == [502] * 4
            assert await ask("red", TALK) == 502
            assert await ask("blue", TALK) == 200
    finally:
        release.set()


async def test_a_demand_that_cannot_be_met_is_the_callers_to_change() -> None:
    """A message that must go, and without which there is nothing to send, is no server's fault."""
    engine = FakeEngine()
    message = {"role": "system", "content": SECRET, "leyline": {"forget": True}}
    async with proxy_before(engine, on_fault="skip") as client:
        answer = await client.post(CHAT, json={**TALK, "messages": [message]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].leyline.forget"
    assert json.dumps(SECRET)[1:-1] not in answer.text
    assert engine.bodies == []
