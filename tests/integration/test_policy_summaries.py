"""Summaries through the proxy: written beside the requests, in place on a later turn."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx
from support.fake_engine import (
    MODEL,
    Answer,
    FakeEngine,
    chat_json,
    forgotten,
    proxy_before,
    tool_session,
)
from support.waiting import until

from leyline_policies.builtin.summarize import TASK
from leyline_policies.recall import stubs_in

CHAT = "/v1/chat/completions"
POLICY = "summarize:trigger_tokens=500,keep_messages=2"


async def ask(client: httpx.AsyncClient, turns: int, **members: Any) -> dict[str, Any]:
    """A turn of the session."""
    body = {"model": MODEL, "messages": tool_session(turns), "max_tokens": 1, **members}
    answer = await client.post(CHAT, json=body, headers={"x-leyline-session": "summed"})
    assert answer.status_code == 200
    account: dict[str, Any] = answer.json()["leyline"]
    return account


async def written(client: httpx.AsyncClient, result: str, count: int) -> None:
    """Wait until so many texts were written or failed."""
    line = f'leyline_policy_completions_total{{result="{result}"}} {count}.0'
    for _ in range(500):
        if line in (await client.get("/metrics")).text:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(line)


async def test_a_summary_is_written_beside_the_requests_and_used_when_ready() -> None:
    """The turn that wants it isn't held up; a later one is sent with it."""
    engine = FakeEngine()
    async with proxy_before(engine, policy=POLICY, edit_timing="now") as client:
        await ask(client, 3)
        await written(client, "written", 1)
        first, question = map(json.loads, engine.bodies)
        assert question["messages"] == [*first["messages"], {"role": "user", "content": TASK}]
        hints = question["custom_params"]["kv_hints"]["actions"][0]["payload"]
        assert hints["session"] == "summed"
        account = await ask(client, 3)
    assert "summary of the conversation" in engine.sent["messages"][0]["content"]
    assert len(engine.sent["messages"]) < len(first["messages"])
    assert account["policy_faults"] == []


async def test_an_engine_that_refuses_is_asked_a_few_times_and_no_more() -> None:
    """The session continues in full."""
    engine = FakeEngine()
    for _ in range(3):
        engine.answers += [chat_json(), Answer([b"{}"], status=500)]
    async with proxy_before(engine, policy=POLICY, edit_timing="now") as client:
        for count in (1, 2, 3, 3, 3):
            account = await ask(client, 3)
            await written(client, "failed", count)
    assert len(engine.bodies) == 5 + 3
    assert account["outcome"] == "unedited"


async def test_a_question_that_a_forget_overtook_is_forgotten_when_it_ends() -> None:
    """Its entries in the cache came after the forget, and its answer holds the forgotten text."""
    engine = FakeEngine()
    engine.receipt = forgotten
    engine.answers = [chat_json(), replace(chat_json("a secret"), pause_s=0.5)]
    async with proxy_before(engine, policy=POLICY, edit_timing="now") as client:
        await ask(client, 3)
        await until(lambda: len(engine.bodies) == 2)
        await ask(client, 3, leyline={"policy": "redact:pattern='List the folders'"})
        await written(client, "written", 1)
        await until(lambda: any(b'"content":"."' in body for body in engine.bodies[3:]))
        await ask(client, 3)
    assert not any(b"a secret" in body for body in engine.bodies)


async def test_what_another_model_was_asked_about_is_unreachable() -> None:
    """The engine isn't given the question's owner, so no forget finds what it read."""
    engine = FakeEngine()
    engine.receipt = forgotten
    async with proxy_before(engine, policy=f"{POLICY},model=other", edit_timing="now") as client:
        await ask(client, 3)
        await written(client, "written", 1)
        account = await ask(client, 3, leyline={"policy": "redact:pattern='List the folders'"})
    assert "custom_params" not in json.loads(engine.bodies[1])
    assert account["forgot"]["result"] == "unreachable"


async def test_a_judge_is_asked_beside_the_requests_and_heard_on_a_later_turn() -> None:
    """The turn that wants it is sent in full; then the steps that it rated lowest are gone."""
    engine = FakeEngine()
    engine.answers = [chat_json(), chat_json("1: 0 0\n2: 0 0")]
    policy = "relevance:trigger_tokens=500,keep_tokens=10"
    async with proxy_before(engine, policy=policy, edit_timing="now") as client:
        await ask(client, 3)
        await written(client, "written", 1)
        first, question = map(json.loads, engine.bodies)
        assert "Rate each earlier step" in question["messages"][0]["content"]
        account = await ask(client, 3)
    assert len(first["messages"]) == len(tool_session(3))
    assert engine.sent["messages"] == [tool_session(3)[0], *tool_session(3)[-2:]]
    (note,) = account["policy_notes"]
    assert (note["kind"], note["dropped"]) == ("judged", 2)


async def test_what_is_offloaded_can_be_recalled_by_its_address() -> None:
    """The engine gets a preview, and the client the whole text by the address in it."""
    engine = FakeEngine()
    text = tool_session(3)[2]["content"]
    policy = f"offload:max_chars={len(text)},preview_chars=20"
    async with proxy_before(engine, policy=policy, edit_timing="now", recall="on") as client:
        await ask(client, 3)
        shown = engine.sent["messages"][2]["content"]
        assert text not in shown and "Tool output too large" in shown
        (stub, *_) = stubs_in(shown)
        found = await client.post(
            "/v1/leyline/sessions/summed/recall", json={"addresses": [stub.address]}
        )
    (piece,) = found.json()["pieces"]
    assert text in piece.values()


async def test_a_question_obeys_the_requests_own_edits() -> None:
    """It is asked about the conversation as it was sent: what the request takes out of a message,
    a call's arguments and reasoning included, is in no request that the proxy makes of it."""
    engine, secret = FakeEngine(), "SECRET-7Q"
    talk = tool_session(3)
    function = {"name": "ls", "arguments": json.dumps({"path": secret})}
    call = {"id": "c0", "type": "function", "function": function}
    talk[1] = {"role": "assistant", "reasoning_content": secret, "tool_calls": [call]}
    edits = [{"message": 1, "replacement": "[gone]"}]
    async with proxy_before(engine, policy=POLICY, edit_timing="now") as client:
        await ask(client, 3, messages=talk, leyline={"edits": edits})
        await written(client, "written", 1)
        bodies = [json.loads(each) for each in engine.bodies]
    (question,) = [each for each in bodies if each["messages"][-1]["content"] == TASK]
    assert question["messages"][1]["tool_calls"][0]["function"] == {"name": "ls", "arguments": "{}"}
    assert secret not in json.dumps(bodies)
