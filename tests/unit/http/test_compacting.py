"""The two requests of a compaction, and what its client gets if the first one fails."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from support.fake_engine import (
    JSON,
    MODEL,
    Answer,
    FakeEngine,
    chat_json,
    chat_stream,
    proxy_before,
    tool_session,
)

from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings
from leyline_proxy.upstream.embedded import ASGIStreamTransport, lifespan_of
from leyline_proxy.wiring.services import Services

CHAT, COMPACT = "/v1/chat/completions", "/v1/responses/compact"
RESPONSES = "/v1/responses"
SUMMARY = "  All folders are listed.\n"
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "ls", "parameters": {}}}
CALL = {"id": "c9", "type": "function", "function": {"name": "ls", "arguments": "{}"}}


def calls_only() -> Answer:
    """An answer that calls a tool in place of a summary."""
    message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    return chat_json(choices=[choice])


def refusal(status: int) -> Answer:
    """An engine's error."""
    error = {"message": "Out of slots.", "type": "server_error", "code": "full"}
    return Answer([json.dumps({"error": error}).encode()], status=status)


def body(**members: Any) -> dict[str, Any]:
    """A chat request that is compacted."""
    wish = {"compact": {"threshold_tokens": 50}}
    return {"model": MODEL, "messages": tool_session(2), "leyline": wish, **members}


async def test_the_summary_is_asked_for_under_the_whole_request() -> None:
    """Its prompt has all that the request's own has; what only shapes the answer is left out, and
    comes back with the compacted request, whose options about messages are gone."""
    engine = FakeEngine()
    engine.answers = [chat_json(SUMMARY)]
    wish = {
        "compact": {"threshold_tokens": 50},
        "edits": [{"message": 0, "chars": [0, 4], "replacement": "Name all"}],
        "boundary": 0,
    }
    shaped = {"response_format": {"type": "json_object"}, "stop": ["x"], "temperature": 0.7}
    given = body(tools=[TOOL], tool_choice="required", max_tokens=5, leyline=wish, **shaped)
    async with proxy_before(engine, compaction_tokens=77) as client:
        answer = (await client.post(CHAT, json=given)).json()
    asked, sent = (json.loads(each) for each in engine.bodies)
    assert asked.keys() - {"custom_params"} == {
        "model",
        "messages",
        "tools",
        "max_tokens",
        "temperature",
    }
    assert (asked["max_tokens"], asked["temperature"], asked["tools"]) == (77, 0, [TOOL])
    assert asked["messages"][0]["content"] == "Name all the folders."
    assert asked["messages"][1:-1] == tool_session(2)[1:]
    assert asked["messages"][-1]["role"] == "user"
    assert [each["content"] for each in sent["messages"]] == [
        "Name all the folders.",
        f"Here is a summary of the conversation to date:\n\n{SUMMARY}",
    ]
    assert shaped.items() <= sent.items()
    assert (sent["max_tokens"], sent["tool_choice"]) == (5, "required")
    assert "leyline" not in sent
    assert answer["leyline"]["compaction"]["messages"] == sent["messages"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (calls_only(), "no_summary"),
        (chat_json("  "), "no_summary"),
        (refusal(500), "upstream_error"),
    ],
)
async def test_a_compaction_that_fails_leaves_the_request_as_it_is(
    first: Answer, reason: str, stream: bool
) -> None:
    """The whole conversation is answered, the account gives the reason, and a metric counts it."""
    engine = FakeEngine()
    engine.answers = [first]
    async with proxy_before(engine) as client:
        response = await client.post(CHAT, json=body(stream=stream))
        metrics = (await client.get("/metrics")).text
    assert response.status_code == 200
    assert json.loads(engine.bodies[-1])["messages"] == tool_session(2)
    assert f'"reason":"{reason}"' in response.text
    assert '"compacted":false' in response.text
    assert 'leyline_compactions_total{result="failed"} 1.0' in metrics
    assert 'leyline_compactions_total{result="written"} 0.0' in metrics


@pytest.mark.parametrize(
    ("first", "status", "code"),
    [(calls_only(), 502, "no_summary"), (refusal(500), 500, "upstream_error")],
)
async def test_what_asks_for_a_compaction_alone_reports_its_failure(
    first: Answer, status: int, code: str
) -> None:
    """The route and the trigger have nothing else to answer with."""
    engine = FakeEngine()
    items = [{"role": "user", "content": "Hello."}]
    asked = ((COMPACT, items), (RESPONSES, [*items, {"type": "compaction_trigger"}]))
    async with proxy_before(engine) as client:
        for path, given in asked:
            engine.answers = [first]
            response = await client.post(path, json={"model": MODEL, "input": given})
            assert response.status_code == status
            assert response.json()["error"]["code"] == code
    assert len(engine.bodies) == 2


async def test_a_summary_counts_as_a_request_of_its_tenant() -> None:
    """Beyond the tenant's rate, the request is answered without it."""
    engine = FakeEngine()
    tenants = {"red": {"api_keys": ["key-red"], "requests_per_minute": 1}}
    headers = {"authorization": "Bearer key-red"}
    async with proxy_before(engine, tenants=tenants) as client:
        response = await client.post(CHAT, json=body(), headers=headers)
    assert response.status_code == 200
    assert response.json()["leyline"]["compaction"]["reason"] == "rate_limit_exceeded"
    assert len(engine.bodies) == 1


async def test_a_request_below_its_threshold_costs_one_turn() -> None:
    """Nothing is asked, and the account says why; without the wish it says nothing."""
    engine = FakeEngine()
    async with proxy_before(engine) as client:
        small = body(leyline={"compact": {"threshold_tokens": 90_000}})
        answer = (await client.post(CHAT, json=small)).json()
        assert answer["leyline"]["compaction"]["reason"] == "below_threshold"
        answer = (await client.post(CHAT, json=body(leyline={}))).json()
        assert "compaction" not in answer["leyline"]
    assert len(engine.bodies) == 2


async def test_the_summary_shares_the_answers_time() -> None:
    """One that never comes costs the request its time limit; the engine is rid of it."""
    engine = FakeEngine()
    engine.answers = [Answer(hangs=True)]
    async with proxy_before(engine, total_timeout_s=0.3) as client:
        response = await client.post(CHAT, json=body())
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "upstream_total"
    assert engine.disconnects >= 1


async def test_a_stream_has_nothing_of_the_summarys_own_answer() -> None:
    """It is the compacted turn's stream, with the summary in the account alone."""
    engine = FakeEngine()
    engine.answers = [chat_json(SUMMARY), chat_stream("Hel", "lo.")]
    async with proxy_before(engine) as client:
        lines = (await client.post(CHAT, json=body(stream=True))).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    said = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    (account,) = [event["leyline"] for event in events if "leyline" in event]
    assert said == "Hello."
    assert account["compaction"]["messages"][-1]["content"].endswith(SUMMARY)


@pytest.mark.parametrize(
    ("first", "read"), [(chat_json(SUMMARY), 2), (refusal(500), 2), (refusal(400), 1)]
)
async def test_no_turn_is_left_open(first: Answer, read: int) -> None:
    """The planned turn is withdrawn before the summary's; each one that the engine may have read
    counts, the failed one, too."""
    engine = FakeEngine()
    engine.answers = [first]
    app = create_app(Settings(log_level="error"), engine_app=engine)
    transport = ASGIStreamTransport(app)
    async with (
        lifespan_of(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=JSON) as client,
    ):
        answer = await client.post(CHAT, json=body(), headers={"session_id": "a name"})
    services: Services = app.state.services
    session = await services.store.get("default", answer.headers["x-leyline-session"])
    assert session is not None
    assert session.unnamed == read
    assert len(services.turns._under_way.openings) == 0
    assert services.turns._under_way._names == set()


SECRET = "SECRET-7Q"
PLAIN: dict[str, Any] = {"role": "system", "content": "Be kind."}
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "replaced": ({}, {"replacement": "[gone]", "mode": "forget"}),
    "in part": ({}, {"chars": [4, 13], "replacement": "", "mode": "forget"}),
    "dropped": ({}, {"drop": True, "mode": "forget"}),
    "forgotten": ({"forget": True}, None),
    "evicted": ({"evict": True}, None),
    "scratch": ({"scratch": True}, None),
    "decayed": ({"decay": {"turns": 1}}, None),
}
"""Ways to take instructions out of the prompt: a message's own member, or a declared edit."""


@pytest.mark.parametrize("first", [chat_json(SUMMARY), refusal(500)], ids=["written", "failed"])
@pytest.mark.parametrize("way", WAYS)
async def test_edits_of_instructions_outlive_a_compaction(way: str, first: Answer) -> None:
    """No request that the proxy makes of the client's has what is taken out of instructions, and an
    edit concerns the same message when others in front of it have gone."""
    annotation, edit = WAYS[way]
    engine = FakeEngine()
    engine.answers = [first]
    secret = {"role": "developer", "content": f"Key {SECRET}.", "leyline": annotation}
    session = tool_session(2)
    talk = [*session[:1], PLAIN, *session[1:3], secret, *session[3:], {**PLAIN, "role": "user"}]
    wish: dict[str, Any] = {"compact": {"threshold_tokens": 50}}
    if edit is not None:
        earlier = {"message": 0, "replacement": "Task.", "mode": edit["mode"]}
        wish["edits"] = [earlier, {"message": 4, **edit}]
    async with proxy_before(engine) as client:
        response = await client.post(CHAT, json=body(messages=talk, leyline=wish))
    assert response.status_code == 200
    assert SECRET.encode() not in b"".join(engine.bodies)
    asked, sent = (json.loads(each) for each in engine.bodies[:2])  # others only carry forgets
    assert SECRET not in response.text
    kept = {"replaced": ["[gone]"], "in part": ["Key ."]}.get(way, [])
    for each in (asked, sent):
        told = [m["content"] for m in each["messages"] if m["role"] in ("system", "developer")]
        assert told == ["Be kind.", *kept]
    assert response.json()["leyline"]["compaction"]["compacted"] == (first.status == 200)
