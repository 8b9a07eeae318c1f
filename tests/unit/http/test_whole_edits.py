"""Declared edits and annotations of whole messages, as the engine gets them by each API."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.fake_engine import LONG, MODEL, FakeEngine, chat_json, proxy_before

from leyline_policies.stubs import address_of
from leyline_proxy.model.asides import RECALL_TOOL

SECRET = "SECRET-7Q"
FORGET = {"forget": True}
SHELL = {"type": "function", "function": {"name": "sh", "parameters": {}}}
ARGUMENTS = json.dumps({"command": SECRET})


def chat(note: dict[str, Any]) -> dict[str, Any]:
    """A request of the chat API whose second message is a call with a secret everywhere."""
    call = {"id": "c1", "type": "function", "function": {"name": "sh", "arguments": ARGUMENTS}}
    said = {"role": "assistant", "content": SECRET, "reasoning_content": SECRET, "refusal": SECRET}
    return {
        "messages": [
            {"role": "user", "content": "Go."},
            {**said, "tool_calls": [call], **note},
            {"role": "tool", "tool_call_id": "c1", "content": "done"},
            {"role": "user", "content": "Go on."},
        ],
    }


def anthropic(note: dict[str, Any]) -> dict[str, Any]:
    """The same in the Messages API."""
    blocks = [
        {"type": "thinking", "thinking": SECRET, "signature": "s"},
        {"type": "text", "text": SECRET},
        {"type": "tool_use", "id": "c1", "name": "sh", "input": {"command": SECRET}},
    ]
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "done"}
    return {
        "max_tokens": 5,
        "messages": [
            {"role": "user", "content": "Go."},
            {"role": "assistant", "content": blocks, **note},
            {"role": "user", "content": [result, {"type": "text", "text": "Go on."}]},
        ],
    }


def responses(note: dict[str, Any]) -> dict[str, Any]:
    """The same in the Responses API, where three items are one message."""
    text = [{"type": "output_text", "text": SECRET}]
    reasoning = [{"type": "reasoning_text", "text": SECRET}]
    return {
        "input": [
            {"role": "user", "content": "Go."},
            {"type": "reasoning", "summary": [], "content": reasoning, **note},
            {"type": "message", "role": "assistant", "content": text},
            {"type": "function_call", "call_id": "c1", "name": "sh", "arguments": ARGUMENTS},
            {"type": "function_call_output", "call_id": "c1", "output": "done"},
            {"role": "user", "content": "Go on."},
        ],
    }


@pytest.mark.parametrize(
    ("path", "request_of"),
    [
        ("/v1/chat/completions", chat),
        ("/v1/messages", anthropic),
        ("/v1/responses", responses),
    ],
)
@pytest.mark.parametrize("declared", [True, False])
async def test_a_whole_message_is_taken_out_in_every_api(
    path: str, request_of: Any, declared: bool
) -> None:
    """Arguments, reasoning and refusals go with the text; the call keeps its id and its name, so
    that its result still answers it."""
    engine, options = FakeEngine(), {}
    if declared:
        options = {"edits": [{"message": 1, "replacement": "[gone]", "mode": "forget"}]}
    note = {} if declared else {"leyline": FORGET}
    body = {"model": MODEL, "leyline": options, **request_of(note)}
    async with proxy_before(engine, log_level="error") as client:
        response = await client.post(path, json=body)
    assert response.status_code == 200
    assert SECRET.encode() not in b"".join(engine.bodies)
    messages = json.loads(engine.bodies[0])["messages"]
    (said,) = [each for each in messages if each["role"] == "assistant"]
    function = {"name": "sh", "arguments": "{}"}
    assert said["tool_calls"] == [{"id": "c1", "type": "function", "function": function}]
    assert said.keys() == {"role", "content", "tool_calls"}
    assert [each.get("tool_call_id") for each in messages].count("c1") == 1


async def test_the_turns_of_a_recall_obey_the_requests_own_edits() -> None:
    """The turn that answers a model's call is sent without what the request takes out, too."""
    engine = FakeEngine()
    arguments = json.dumps({"address": address_of(LONG)})
    call = {"id": "r0", "type": "function", "function": {"name": RECALL_TOOL}}
    call["function"] = {"name": RECALL_TOOL, "arguments": arguments}
    asks = {"role": "assistant", "content": None, "tool_calls": [call]}
    choice = {"index": 0, "message": asks, "finish_reason": "tool_calls"}
    engine.answers = [chat_json(choices=[choice]), chat_json()]
    body = chat({})
    body["messages"][2]["content"] = LONG
    body["messages"] += [
        {"role": "assistant", "content": "Well."},
        {"role": "user", "content": "?"},
    ]
    edits = [{"message": 1, "replacement": "[gone]", "mode": "amortize"}]
    policy = "truncate_older_than:n=0,max_chars=80,recallable=true"
    async with proxy_before(engine, recall="on", policy=policy, log_level="error") as client:
        response = await client.post(
            "/v1/chat/completions",
            json={"model": MODEL, "leyline": {"edits": edits}, **body},
            headers={"x-leyline-session": "recalls"},
        )
    assert len(response.json()["leyline"]["recall"]["turns"]) == 1
    first, last = (json.loads(each)["messages"] for each in engine.bodies)
    assert LONG not in json.dumps(first)
    assert any(each["content"] == LONG for each in last)
    assert SECRET not in json.dumps([first, last])
