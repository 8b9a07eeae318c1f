"""Texts of other providers' items are texts of their messages: policies, edits and forgets reach
them, and none goes to an upstream by another way."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.fake_engine import MODEL, FakeEngine, proxy_before
from test_native_apis import MESSAGES, RESPONSES, Upstream, before

KEY = "hunter2-hunter2"
CHAT = "/v1/chat/completions"
PAGE = {
    "type": "web_fetch_tool_result",
    "tool_use_id": "s",
    "content": {
        "type": "web_fetch_result",
        "url": "https://a.example",
        "content": {"type": "document", "source": {"type": "text", "data": f"The key is {KEY}."}},
    },
}
USE = {"type": "server_tool_use", "id": "s", "name": "web_fetch", "input": {"key": KEY}}
SAID = {"type": "text", "text": "I looked."}
BLOCKS = {"role": "assistant", "content": [SAID, USE, PAGE]}
ITEM = {"type": "mcp_call", "name": "n", "server_label": "s", "arguments": "{}", "output": KEY}
USER = {"role": "user", "content": "Look."}
NEXT = {"role": "user", "content": "And?"}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER, BLOCKS, NEXT]},
    MESSAGES: {"messages": [USER, BLOCKS, NEXT], "max_tokens": 4},
    RESPONSES: {"input": [USER, ITEM, NEXT]},
}
WAYS: dict[str, dict[str, Any]] = {
    "redaction": {"leyline": {"policy": f"redact:pattern={KEY}"}},
    "forget": {"leyline": {"edits": [{"message": 1, "replacement": "[gone]", "mode": "forget"}]}},
    "drop": {"leyline": {"edits": [{"message": 1, "drop": True}]}},
}


@pytest.mark.parametrize("way", [*WAYS, "own"])
@pytest.mark.parametrize("path", BODIES)
async def test_a_secret_in_an_item_goes_like_any_other(
    engine: FakeEngine, path: str, way: str
) -> None:
    """Redaction, declared edits and a message's own demand take it out; without any it is shown."""
    body = {"model": MODEL, **json.loads(json.dumps(BODIES[path]))}
    async with proxy_before(engine) as client:
        answer = await client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert KEY.encode() in engine.bodies[-1]
        if way == "own":
            body["messages" if "messages" in body else "input"][1]["leyline"] = {"forget": True}
        answer = await client.post(path, json={**body, **WAYS.get(way, {})})
        assert answer.status_code == 200, answer.text
    assert KEY.encode() not in engine.bodies[-1]


async def test_a_chat_request_with_parts_of_another_provider(engine: FakeEngine) -> None:
    """They are texts, in their places; other unknown parts are the engine's own; and characters of
    a message that the client doesn't have are no demand."""
    own = {"type": "thinking", "thinking": "Hm."}
    upload = {"type": "container_upload", "file_id": "f"}
    told = {"role": "assistant", "content": [own, SAID, USE, upload]}
    empty = {"role": "assistant", "content": [upload]}
    body = {"model": MODEL, "messages": [USER, told, USER, empty, NEXT]}
    edit = {"message": 1, "chars": [0, 2], "replacement": "", "mode": "forget"}
    async with proxy_before(engine) as client:
        for turn in range(2):
            answer = await client.post(CHAT, json=body)
            assert answer.status_code == 200, answer.text
            shown = {"type": "text", "text": f'[server_tool_use] web_fetch\n{{"key":"{KEY}"}}'}
            sent = engine.sent["messages"]
            assert sent[1]["content"] == [own, SAID, shown]
            assert sent[3]["content"] == ""
            body["messages"] = [*body["messages"], sent[3], {"role": "user", "content": str(turn)}]
        refused = await client.post(CHAT, json={**body, "leyline": {"edits": [edit]}})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "leyline.edits[0].chars")


def test_items_that_name_what_a_provider_stores_pass_translated_only() -> None:
    """An upstream of the client's own API gets no id of a file or a container, which could be
    another tenant's there."""
    upstream = Upstream()
    image = {"type": "image", "source": {"type": "file", "file_id": "theirs"}}
    older = [{"role": "user", "content": [image]}, {"role": "assistant", "content": "I see."}]
    shot = {"type": "computer_screenshot", "file_id": "theirs"}
    shell = {"action": {"commands": ["ls"]}, "environment": {"container_id": "theirs"}}
    asked: list[tuple[str, dict[str, Any]]] = [
        (MESSAGES, {"messages": [*older, NEXT], "max_tokens": 4}),
        (MESSAGES, {"messages": [USER, BLOCKS, NEXT], "max_tokens": 4}),
        *(
            (RESPONSES, {"store": False, "input": [USER, *items, NEXT]})
            for items in (
                [{"type": "code_interpreter_call", "container_id": "theirs", "code": "1"}],
                [{"type": "shell_call", "call_id": "c", **shell}],
                [{"type": "computer_call_output", "call_id": "c", "output": shot}, SAID_ITEM],
                [{"type": "of_next_year", "file_id": "theirs"}],
            )
        ),
    ]
    with before(upstream) as client:
        for path, body in asked:
            answer = client.post(path, json={"model": MODEL, **body})
            assert answer.status_code == 200, answer.text
    assert not upstream.taken
    assert len(upstream.bodies) == len(asked)
    assert not any(b"theirs" in raw for raw in upstream.bodies)


SAID_ITEM = {"type": "message", "role": "assistant", "content": "I see."}


async def test_results_without_a_call_or_a_text_reach_the_engine(engine: FakeEngine) -> None:
    """A client that cuts its history sends them, in the other APIs, too. They go as they came, but
    for a null, which vLLM refuses."""
    results: list[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": "gone", "content": "b"},
        {"role": "tool", "tool_call_id": "gone", "content": None},
        {"role": "tool"},
    ]
    block = {"type": "tool_result", "tool_use_id": "gone", "content": "b"}
    output = {"type": "function_call_output", "call_id": "gone", "output": "b"}
    nameless = {"type": "function_call_output", "output": "b"}
    asked = [
        (CHAT, {"messages": [USER, *results, NEXT]}, results),
        (
            MESSAGES,
            {"messages": [USER, {"role": "user", "content": [block]}], "max_tokens": 4},
            results[:1],
        ),
        (
            RESPONSES,
            {"input": [USER, output, nameless]},
            [results[0], {"role": "tool", "content": "b"}],
        ),
    ]
    async with proxy_before(engine) as client:
        for path, body, shown in asked:
            answer = await client.post(path, json={"model": MODEL, **body})
            assert answer.status_code == 200, answer.text
            read = [{**each, "content": ""} if None in each.values() else each for each in shown]
            assert engine.sent["messages"][1 : 1 + len(shown)] == read
