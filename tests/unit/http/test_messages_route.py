"""``/v1/messages`` before a scripted engine: what goes upstream, and what comes back."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.fake_engine import (
    DONE,
    MODEL,
    Answer,
    FakeEngine,
    chat_json,
    chat_stream,
    chunk,
    proxy_before,
)
from support.messages_route import MESSAGES, SSE, USE, body, events, kinds
from support.metrics_page import REQUESTS, metric


async def test_the_engine_gets_a_chat_request(engine: FakeEngine) -> None:
    """It has the proxy's envelope, and lacks the parts between the client and Anthropic."""
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "context-management-2025-06-27",
        "x-api-key": "secret",
    }
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "b.py"}
    talk = [
        {"role": "user", "content": "List."},
        {"role": "assistant", "content": [USE]},
        {"role": "user", "content": [result]},
    ]
    async with proxy_before(engine) as client:
        asked = body(*talk, system="Be terse.", priority=9)
        answer = await client.post(f"{MESSAGES}?beta=true", json=asked, headers=headers)
        assert await metric(client, REQUESTS, f'route="{MESSAGES}"', 'status="200"') == 1
    assert answer.status_code == 200, answer.text
    roles = [message["role"] for message in engine.sent["messages"]]
    assert roles == ["system", "user", "assistant", "tool"]
    assert "kv_hints" in engine.sent["custom_params"]
    assert "priority" not in engine.sent
    assert not [name for name in engine.headers[-1] if name.startswith("anthropic")]
    assert "x-api-key" not in engine.headers[-1]


async def test_an_answer_is_a_message_with_its_account(engine: FakeEngine) -> None:
    """Cached tokens are read tokens; receipt and session are where chat answers have them."""
    details = {"cached_tokens": 4}
    usage = {"prompt_tokens": 10, "completion_tokens": 2, "prompt_tokens_details": details}
    engine.answers.append(chat_json("Hi.", usage=usage))
    async with proxy_before(engine) as client:
        answer = await client.post(MESSAGES, json=body())
    message = answer.json()
    account = message.pop("leyline")
    assert message.pop("id").startswith("msg_")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": "Hi."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "stop_details": None,
        "usage": {
            "input_tokens": 6,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 4,
            "output_tokens": 2,
        },
    }
    assert account["session"] == answer.headers["x-leyline-session"]
    assert answer.headers["x-leyline-cached-tokens"] == "4"
    assert answer.headers["request-id"].startswith("req_")


def scripted(**members: Any) -> Answer:
    """A stream with thinking, text and a call; usage comes after the finish chunk."""
    call = {"index": 0, "id": "c1", "function": {"name": "ls", "arguments": ""}}
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "Hm."},
        {"content": "I look."},
        {"tool_calls": [call]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"path"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ': "é"}'}}]},
    ]
    usage = {"prompt_tokens": 10, "completion_tokens": 5}
    last = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
    parts = [
        b": hello\n\n",
        *map(chunk, deltas),
        b": wait\n\n",
        chunk({}, "tool_calls"),
        last,
        DONE,
    ]
    return Answer(parts, content_type=SSE, **members)


STREAMED = [
    "message_start",
    "ping",
    "content_block_start",
    "content_block_delta",
    "content_block_delta",
    "content_block_stop",
    "content_block_start",
    "content_block_delta",
    "content_block_stop",
    "content_block_start",
    "content_block_delta",
    "content_block_delta",
    "ping",
    "content_block_stop",
    "message_delta",
    "message_stop",
]


async def test_a_stream_is_the_events_of_a_message(engine: FakeEngine) -> None:
    """Comments of the engine are pings; the last delta has usage and account."""
    engine.answers.append(scripted())
    async with proxy_before(engine) as client:
        answer = await client.post(MESSAGES, json=body(stream=True))
        session = await client.get(f"/v1/leyline/sessions/{answer.headers['x-leyline-session']}")
    found = events(answer.text)
    assert answer.headers["content-type"].startswith(SSE)
    assert engine.sent["stream_options"] == {"include_usage": True}
    assert kinds(found) == STREAMED
    assert found[-2]["delta"]["stop_reason"] == "tool_use"
    assert found[-2]["usage"]["output_tokens"] == 5
    # This engine's usage doesn't say what was cached; its receipt does.
    assert found[-2]["usage"]["cache_read_input_tokens"] == 4
    assert found[-2]["leyline"]["outcome"] == "unedited"
    assert session.json()["turns"] == 1


@settings(max_examples=examples(30))
@given(st.lists(st.integers(1, 1500), max_size=12))
def test_however_the_engines_stream_is_cut(cuts: list[int]) -> None:
    """Chunks of the network may end anywhere, also inside a character."""
    stream = b"".join(scripted().chunks)
    places = sorted({0, len(stream), *(cut % len(stream) for cut in cuts)})
    parts = [stream[a:b] for a, b in pairwise(places)]
    engine = FakeEngine()
    engine.answers.append(Answer(parts, content_type=SSE))

    async def ask() -> str:
        async with proxy_before(engine) as client:
            return (await client.post(MESSAGES, json=body(stream=True))).text

    found = events(asyncio.run(ask()))
    assert kinds(found) == STREAMED
    pieces = [event["delta"].get("partial_json", "") for event in found if "delta" in event]
    assert json.loads("".join(pieces)) == {"path": "é"}


@pytest.mark.parametrize("tail", [b"", b"data: [DONE]", b"data: [DONE]\n"])
async def test_a_stream_may_lack_its_last_event(engine: FakeEngine, tail: bytes) -> None:
    """The engine's reason for the end is enough."""
    parts = [chunk({"content": "a"}), chunk({}, "stop"), *([tail] if tail else [])]
    engine.answers.append(Answer(parts, content_type=SSE))
    async with proxy_before(engine) as client:
        answer = await client.post(MESSAGES, json=body(stream=True))
    assert kinds(events(answer.text))[-2:] == ["message_delta", "message_stop"]


async def test_a_stop_sequence_is_told_where_the_engine_tells_it(engine: FakeEngine) -> None:
    """Whole and streamed."""
    choice = {"index": 0, "finish_reason": "stop", "matched_stop": "END"}
    said = {"role": "assistant", "content": "a"}
    last = {"choices": [{**choice, "delta": {}}]}
    engine.answers += [
        chat_json(choices=[{**choice, "message": said}]),
        Answer(
            [chunk(said), b"data: " + json.dumps(last).encode() + b"\n\n", DONE], content_type=SSE
        ),
    ]
    async with proxy_before(engine) as client:
        whole = (await client.post(MESSAGES, json=body(stop_sequences=["END"]))).json()
        asked = body(stop_sequences=["END"], stream=True)
        streamed = events((await client.post(MESSAGES, json=asked)).text)[-2]["delta"]
    for stopped in (whole, streamed):
        assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "END")


async def test_plain_back_ends_are_served_as_well() -> None:
    """Without receipts, what the usage says is what there is to say."""
    engine = FakeEngine(capability=None)
    engine.answers += [chat_json("Hi."), chat_stream("Hi.")]
    async with proxy_before(engine) as client:
        whole = await client.post(MESSAGES, json=body())
        streamed = await client.post(MESSAGES, json=body(stream=True))
    assert "custom_params" not in engine.sent
    assert whole.json()["usage"]["input_tokens"] == 10
    last = events(streamed.text)[-2]
    assert last["delta"]["stop_reason"] == "end_turn"
    assert last["leyline"]["turn_index"] == 0
