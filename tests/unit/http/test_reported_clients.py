"""Requests of real clients that other gateways were reported to answer wrongly."""

from __future__ import annotations

import json

import pytest
from support.fake_engine import MODEL, FakeEngine, proxy_before
from support.messages_route import MESSAGES, body

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
ANTHROPIC = {"anthropic-version": "2023-06-01"}


async def test_a_model_is_found_by_its_name(engine: FakeEngine) -> None:
    """Engines without a path for single models have it here, also for names with slashes, in the
    shape of the client's API; a name that isn't listed is the engine's to judge."""
    engine.models = ["org/base-7b", MODEL]
    async with proxy_before(engine) as client:
        for path in ("org/base-7b", "org%2Fbase-7b"):
            found = await client.get(f"/v1/models/{path}")
            assert (found.status_code, found.json()["object"]) == (200, "model")
            shaped = await client.get(f"/v1/models/{path}", headers=ANTHROPIC)
            assert (shaped.json()["type"], shaped.json()["id"]) == ("model", "org/base-7b")
        assert (await client.get("/v1/models/adapter")).json() == {"error": {"message": "no"}}


@pytest.mark.parametrize("path", ["/", "/healthz", "/readyz", "/metrics", "/v1/models"])
async def test_what_can_be_read_can_be_asked_for(engine: FakeEngine, path: str) -> None:
    """Clients send HEAD to learn that the proxy is there, and give up if it isn't possible."""
    async with proxy_before(engine) as client:
        read, asked = await client.get(path), await client.head(path)
    assert (read.status_code, asked.status_code) == (200, 200)


async def test_a_key_beside_a_token_for_another_service_counts(engine: FakeEngine) -> None:
    """A client that is signed in elsewhere sends that token as Bearer and its key as x-api-key;
    a key that belongs to nobody is refused in either place."""
    async with proxy_before(engine, api_keys=["team:right"]) as client:

        async def status(bearer: str, key: str) -> int:
            headers = {"authorization": f"Bearer {bearer}", "x-api-key": key}
            return (await client.post(MESSAGES, json=body(), headers=headers)).status_code

        assert [await status("sk-ant-oat01-a", "right"), await status("right", "old")] == [200, 200]
        assert await status("sk-ant-oat01-a", "old") == 401


@pytest.mark.parametrize(
    ("owner", "edits", "goes_on"),
    [
        ("vllm", [], True),
        ("sglang", [], True),
        ("openai", [], False),
        ("vllm", [{"message": 1, "drop": True, "mode": "amortize"}], False),
    ],
)
async def test_an_answer_that_was_begun_goes_on(
    owner: str, edits: list[dict[str, object]], goes_on: bool
) -> None:
    """Only servers that can are asked to, and only while the beginning is the last message."""
    engine = FakeEngine(capability=None)
    engine.owner = owner
    begun = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "I"}]
    async with proxy_before(engine) as client:
        asked = body(*begun, leyline={"edits": edits})
        assert (await client.post(MESSAGES, json=asked)).status_code == 200
    given = {
        name: engine.sent.get(name) for name in ("continue_final_message", "add_generation_prompt")
    }
    assert given == (
        {"continue_final_message": True, "add_generation_prompt": False}
        if goes_on
        else {"continue_final_message": None, "add_generation_prompt": None}
    )


@pytest.mark.parametrize(
    ("path", "member", "other"), [(CHAT, "input", RESPONSES), (RESPONSES, "messages", CHAT)]
)
async def test_a_request_of_the_other_api_is_told_its_path(
    engine: FakeEngine, path: str, member: str, other: str
) -> None:
    """A client that is set up for one API and asks the other's path learns what to change."""
    async with proxy_before(engine) as client:
        asked = {"model": MODEL, member: [{"role": "user", "content": "Go."}]}
        refused = await client.post(path, json=asked)
    assert refused.status_code == 400
    assert f"POST {other}" in refused.json()["error"]["message"]


async def test_a_chat_goes_on_after_a_call_that_broke_off(engine: FakeEngine) -> None:
    """The engine gets an object in its place on every later turn, and all else byte for byte."""
    broken = {"name": "ls", "arguments": '{"path": '}
    whole = {"name": "ls", "arguments": '{"b":1,  "a":2}'}
    calls = [
        {"id": f"c{number}", "type": "function", "function": each}
        for number, each in enumerate((broken, whole))
    ]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "x"} for call in calls]
    talk = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": None, "tool_calls": calls},
        *results,
    ]
    async with proxy_before(engine) as client:
        for _ in range(2):
            asked = {"model": MODEL, "messages": talk, "temperature": 0.5}
            assert (await client.post(CHAT, json=asked)).status_code == 200
            sent = engine.sent["messages"]
            one, two = (each["function"]["arguments"] for each in sent[1]["tool_calls"])
            assert (json.loads(one), two) == ({"INVALID_JSON": '{"path": '}, whole["arguments"])
            assert [sent[0], *sent[2:]] == [talk[0], *talk[2:]]
            talk = [*talk, {"role": "assistant", "content": "Hello."}, talk[0]]
