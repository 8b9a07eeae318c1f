"""``max_tokens: 0``: the prompt is prefilled, and the client gets nothing that was generated."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.fake_engine import (
    DONE,
    MODEL,
    Answer,
    FakeEngine,
    chat_json,
    chunk,
    proxy_before,
)
from support.messages_route import events

from leyline_proxy.apis.prewarm import emptied
from leyline_proxy.request.prewarm import for_one_token, prewarms

SSE = "text/event-stream"
TALK = [{"role": "user", "content": "Hello."}]
SECRET = "generated"
USAGE = {
    "prompt_tokens": 10,
    "completion_tokens": 1,
    "total_tokens": 11,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 1},
}
CALL = {"index": 0, "id": "c", "function": {"name": SECRET, "arguments": SECRET}}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TALK, "max_tokens": 0},
    "/v1/completions": {"prompt": "Hello.", "max_tokens": 0},
    "/v1/responses": {"input": "Hello.", "max_output_tokens": 0},
    "/v1/messages": {"messages": TALK, "max_tokens": 0},
}


def generated(path: str, *, stream: bool) -> Answer:
    """An answer of one token, in all places where engines put text."""
    if path == "/v1/completions":
        choice = {"index": 0, "text": SECRET, "finish_reason": "stop", "logprobs": {"a": SECRET}}
        document = {"id": "c", "model": MODEL, "choices": [choice], "usage": USAGE}
        raw = json.dumps(document).encode()
        return (
            Answer([b"data: " + raw + b"\n\n", DONE], content_type=SSE) if stream else Answer([raw])
        )
    said = {"content": SECRET, "reasoning_content": SECRET, "tool_calls": [CALL]}
    if stream:
        last = chunk({"content": SECRET}, "stop", usage=USAGE)
        parts = [chunk({"role": "assistant", "content": ""}), chunk(said), last, DONE]
        return Answer(parts, content_type=SSE)
    choice = {
        "index": 0,
        "message": {"role": "assistant", **said},
        "finish_reason": "tool_calls",
        "matched_stop": SECRET,
        "logprobs": {"content": [SECRET]},
    }
    return chat_json(choices=[choice], usage=USAGE)


@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_generated_reaches_the_client(
    engine: FakeEngine, path: str, stream: bool
) -> None:
    """On each API the answer is empty, ends because of its limit, and counts the prompt alone; the
    engine was asked for one token, which all engines take."""
    engine.answers.append(generated(path, stream=stream))
    asked = {"model": MODEL, "stream": stream, **REQUESTS[path]}
    if stream and "completions" in path:
        asked["stream_options"] = {"include_usage": True}
    async with proxy_before(engine) as client:
        answer = await client.post(path, json=asked, headers={"x-leyline-session": "s"})
        session = await client.get("/v1/leyline/sessions/s")
    assert answer.status_code == 200, answer.text
    assert SECRET not in answer.text
    assert engine.sent["max_tokens"] == 1
    if path != "/v1/completions":
        assert session.status_code == 200
        assert session.json()["turns"] == 1
    check_end(path, answer.text, stream=stream)


def check_end(path: str, text: str, *, stream: bool) -> None:
    """Check the end of an answer, its content and its counts."""
    if "completions" in path:
        chunks = [json.loads(each[6:]) for each in text.split("\n\n")[:-2]] if stream else []
        document = chunks[-1] if stream else json.loads(text)
        assert document["choices"][0]["finish_reason"] == "length"
        usage = document["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (
            (10, 0, 10)
        )
        return
    last = events(text)[-1 if path == "/v1/responses" else -2] if stream else json.loads(text)
    if path == "/v1/responses":
        response = last["response"] if stream else last
        assert (response["status"], response["output"]) == ("incomplete", [])
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert response["usage"]["output_tokens"] == 0
        assert response["usage"]["total_tokens"] == 10
        return
    stop = last["delta"] if stream else last
    assert (stop["stop_reason"], stop["stop_sequence"]) == ("max_tokens", None)
    assert last["usage"]["output_tokens"] == 0
    assert last["usage"]["input_tokens"] + last["usage"]["cache_read_input_tokens"] == 10
    if stream:
        assert not [each for each in events(text) if each["type"].startswith("content_block")]
    else:
        assert last["content"] == []


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"max_tokens": 0}, True),
        ({"max_tokens": 0.0}, True),
        ({"max_completion_tokens": 0}, True),
        ({"max_completion_tokens": 0, "max_tokens": 9}, True),
        ({"max_completion_tokens": 9, "max_tokens": 0}, False),
        ({"max_completion_tokens": None, "max_tokens": 0}, True),
        ({"max_tokens": False}, False),
        ({"max_tokens": "0"}, False),
        ({"max_tokens": 1}, False),
        ({}, False),
        ({"max_tokens": 0, "echo": True}, False),
    ],
)
def test_which_requests_prewarm(body: dict[str, Any], expected: bool) -> None:
    """Those whose limit is the number 0, by the member that counts; one that echoes its prompt asks
    for something."""
    assert prewarms(body) is expected


def test_the_engine_gets_one_limit_of_one() -> None:
    """Under the client's names, however they are spelled, and without a demand for more."""
    raw = b'{"max\\u005ftokens": 0, "n": 1, "max_completion_tokens": 0, "min_tokens": 4}'
    sent = for_one_token(raw, json.loads(raw))
    assert json.loads(sent) == {"n": 1, "max_completion_tokens": 1, "max_tokens": 1}
    assert sent.count(b"tokens") == 2


def test_every_choice_is_emptied() -> None:
    """So are several answers, and an answer without counts stays without."""
    choices = [{"index": i, "message": {"content": SECRET}} for i in range(2)]
    shown = emptied({"id": "a", "choices": choices})
    assert SECRET not in json.dumps(shown)
    assert [each["index"] for each in shown["choices"]] == [0, 1]
    assert "usage" not in shown
