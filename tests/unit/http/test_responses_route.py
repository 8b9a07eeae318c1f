"""``/v1/responses`` before a scripted engine: what goes upstream, and what comes back."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.fake_engine import (
    DONE,
    Answer,
    FakeEngine,
    chat_json,
    chat_stream,
    chunk,
    proxy_before,
)
from support.messages_route import SSE, events, kinds
from support.metrics_page import REQUESTS, metric
from support.responses_route import CALL, LS, RESPONSES, RESULT, USER, ask, body, scripted


async def test_the_engine_gets_a_chat_request(engine: FakeEngine) -> None:
    """It has the proxy's envelope, and lacks the parts between the client and OpenAI."""
    headers = {
        "openai-organization": "o",
        "x-codex-turn-metadata": "{}",
        "authorization": "Bearer secret",
        "x-trace": "t",
    }
    async with proxy_before(engine) as client:
        asked = body([USER, CALL, RESULT], instructions="Be terse.", tools=[LS], priority=9)
        answer = await client.post(RESPONSES, json=asked, headers=headers)
        assert await metric(client, REQUESTS, f'route="{RESPONSES}"', 'status="200"') == 1
    assert answer.status_code == 200, answer.text
    roles = [message["role"] for message in engine.sent["messages"]]
    assert roles == ["system", "user", "assistant", "tool"]
    assert "kv_hints" in engine.sent["custom_params"]
    assert "priority" not in engine.sent
    assert engine.headers[-1]["x-trace"] == "t"
    assert not engine.headers[-1].keys() & {*headers} - {"x-trace"}


async def test_an_answer_is_a_response_with_its_account(engine: FakeEngine) -> None:
    """Receipt and session are where chat answers have them."""
    details = {"cached_tokens": 4}
    usage = {"prompt_tokens": 10, "completion_tokens": 2, "prompt_tokens_details": details}
    engine.answers.append(chat_json("Hi.", usage=usage))
    async with proxy_before(engine) as client:
        asked = body(instructions="Be terse.", metadata={"a": "b"}, temperature=0.5, tools=[LS])
        answer = await client.post(RESPONSES, json=asked)
    response = answer.json()
    account = response["leyline"]
    assert response["id"].startswith("resp_")
    assert (response["object"], response["status"]) == ("response", "completed")
    assert response["output"][0]["content"][0]["text"] == "Hi."
    assert response["usage"]["input_tokens_details"]["cached_tokens"] == 4
    for name in ("instructions", "metadata", "temperature", "tools"):
        assert response[name] == asked[name]
    assert (response["store"], response["truncation"], response["top_p"]) == (True, "disabled", 1.0)
    assert account["session"] == answer.headers["x-leyline-session"]
    assert answer.headers["x-leyline-cached-tokens"] == "4"


async def test_a_stream_is_the_events_of_a_response(engine: FakeEngine) -> None:
    """The last has usage and account; the response is stored by then."""
    engine.answers.append(scripted())
    async with proxy_before(engine) as client:
        answer = await client.post(RESPONSES, json=body(stream=True, tools=[LS]))
        found = events(answer.text)
        response = found[-1]["response"]
        stored = await client.get(f"{RESPONSES}/{response['id']}")
        session = await client.get(f"/v1/leyline/sessions/{answer.headers['x-leyline-session']}")
    assert answer.headers["content-type"].startswith(SSE)
    assert engine.sent["stream_options"] == {"include_usage": True}
    assert kinds(found)[:2] == ["response.created", "response.in_progress"]
    assert kinds(found)[-1] == "response.completed"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert [item["type"] for item in response["output"]] == [
        "reasoning",
        "message",
        "function_call",
    ]
    assert response["usage"]["output_tokens"] == 5
    # This engine's usage doesn't say what was cached; its receipt does.
    assert response["usage"]["input_tokens_details"]["cached_tokens"] == 4
    assert response["leyline"]["outcome"] == "unedited"
    assert stored.json() == response
    assert session.json()["turns"] == 1


@settings(max_examples=examples(30))
@given(st.lists(st.integers(1, 1500), max_size=20))
async def test_chunks_may_be_cut_anywhere(cuts: list[int]) -> None:
    """The events are the same, wherever the engine's bytes are parted."""
    engine = FakeEngine()
    whole = b"".join(scripted().chunks)
    places = sorted({0, len(whole), *(cut % len(whole) for cut in cuts)})
    parts = [whole[start:end] for start, end in pairwise(places)]
    engine.answers += [Answer(parts, content_type=SSE), scripted()]
    texts = []
    async with proxy_before(engine) as client:
        for _ in range(2):
            answer = await client.post(RESPONSES, json=body(stream=True, tools=[LS]))
            found = events(answer.text)
            name = found[0]["response"]["id"].removeprefix("resp_")
            del found[-1]["response"]["leyline"]
            texts.append(json.dumps(found).replace(name, "KEY"))
    assert kinds(json.loads(texts[0])) == kinds(json.loads(texts[1]))
    times = [json.loads(text)[0]["response"]["created_at"] for text in texts]
    assert texts[0].replace(str(times[0]), "T") == texts[1].replace(str(times[1]), "T")


@pytest.mark.parametrize(
    ("status", "asked", "param"),
    [
        (400, b"{", None),
        (400, b'{"input": "a"}', "model"),
        (400, json.dumps(body([{"role": "x", "content": ""}])).encode(), "input[0].role"),
        (400, json.dumps(body([USER], stream="yes")).encode(), "stream"),
        (400, json.dumps(body([USER], store="yes")).encode(), "store"),
        (400, json.dumps(body([USER], background=True)).encode(), "background"),
        (400, json.dumps(body([{**USER, "leyline": {"pinn": True}}])).encode(), "input[0].leyline"),
        (
            400,
            json.dumps(body([{**USER, "leyline": {"forget": True}}])).encode(),
            "input[0].leyline.forget",
        ),
        (
            400,
            json.dumps(body([USER], leyline={"edits": [{"message": 0, "drop": True}]})).encode(),
            "leyline.edits[0].drop",
        ),
        (404, json.dumps(body(model="gone")).encode(), "model"),
        (404, json.dumps(body(previous_response_id="resp_1")).encode(), "previous_response_id"),
        (400, b'{"model":"m","input":' + b"[" * 5000 + b"]" * 5000 + b"}", None),
        (400, json.dumps(body(metadata=[[[[[]]]]], input=None)).encode(), "input"),
    ],
)
async def test_mistakes_are_told_in_the_clients_terms(
    engine: FakeEngine, status: int, asked: bytes, param: str | None
) -> None:
    """They are reported in OpenAI's shape, before anything goes upstream."""
    async with proxy_before(engine) as client:
        headers = {"content-type": "application/json"}
        answer = await client.post(RESPONSES, content=asked, headers=headers)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error.keys() >= {"message", "type", "param", "code"}
    assert (error["param"] or "").startswith(param or "")
    assert engine.bodies == []


async def test_the_engines_refusal_keeps_its_words(engine: FakeEngine) -> None:
    """It keeps its code, too; places are the client's."""
    error = {"message": "messages[1] is odd.", "type": "odd", "param": "messages[1]", "code": "c"}
    document = json.dumps({"error": error}).encode()
    engine.answers += [Answer([document], status=422), Answer([b"down"], status=500)]
    async with proxy_before(engine) as client:
        refused = await client.post(RESPONSES, json=body([USER], instructions="S"))
        down = await client.post(RESPONSES, json=body([USER]))
    assert refused.status_code == 422
    told = {**error, "message": "input[0] is odd.", "param": "input[0]"}
    assert refused.json()["error"] == told
    assert down.status_code == 500
    assert down.json()["error"]["type"] == "upstream_error"


@pytest.mark.parametrize("how", ["breaks", "error", "ends", "mixed"])
async def test_a_stream_that_fails_says_so(engine: FakeEngine, how: str) -> None:
    """Its last events are an error and a failed response; nothing is stored."""
    begun = [chunk({"role": "assistant", "content": "a"})]
    told = b'data: {"error": {"message": "out of memory", "type": "abort"}}\n\n'
    loose = chunk({"tool_calls": [{"index": 0, "id": "c", "function": {"arguments": "{}"}}]})
    more = {"error": [told, DONE], "mixed": [loose, chunk({}, "stop"), DONE]}.get(how, [])
    engine.answers.append(Answer([*begun, *more], content_type=SSE, breaks=how == "breaks"))
    async with proxy_before(engine) as client:
        answer = await client.post(RESPONSES, json=body(stream=True))
        found = events(answer.text)
        stored = await client.get(f"{RESPONSES}/{found[0]['response']['id']}")
    assert kinds(found)[-2:] == ["error", "response.failed"]
    assert kinds(found).count("error") == 1
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    if how == "error":
        assert found[-2]["message"] == "out of memory"
    assert found[-1]["response"]["status"] == "failed"
    assert stored.status_code == 404


async def test_what_is_no_answer_is_a_bad_gateway(engine: FakeEngine) -> None:
    """It is one before the turn counts, and nothing is stored."""
    engine.answers.append(Answer([b'{"choices": []}']))
    async with proxy_before(engine) as client:
        answer = await client.post(RESPONSES, json=body())
    assert answer.status_code == 502
    assert answer.json()["error"]["code"] == "upstream_invalid_response"


async def test_numbers_of_any_size_come_back(engine: FakeEngine) -> None:
    """Metadata and schemas are the client's own."""
    async with proxy_before(engine) as client:
        asked = json.dumps(body(metadata={"n": 10**30}, tools=[{**LS, "n": 10**30}])).encode()
        answer = await client.post(RESPONSES, content=asked)
        stored = await client.get(f"{RESPONSES}/{answer.json()['id']}")
        streamed = await client.post(RESPONSES, json=body(metadata={"n": 10**30}, stream=True))
    assert answer.json()["metadata"] == stored.json()["metadata"] == {"n": 10**30}
    assert events(streamed.text)[-1]["response"]["metadata"] == {"n": 10**30}


async def test_a_get_that_opens_no_socket_says_so(engine: FakeEngine) -> None:
    """The path is a WebSocket's, which an ordinary GET doesn't open."""
    async with proxy_before(engine) as client:
        answer = await client.get(RESPONSES)
    assert (answer.status_code, answer.json()["error"]["code"]) == (426, "no_handshake")
    assert answer.headers["upgrade"] == "websocket"
    assert "POST" in answer.json()["error"]["message"]


async def test_tokens_that_cant_be_counted(engine: FakeEngine) -> None:
    """If the engine's template isn't known, the engine does the truncation, and a count isn't made
    up."""
    async with proxy_before(engine) as client:
        response = await ask(client, [USER, USER, USER], truncation="auto")
        counted = await client.post(f"{RESPONSES}/input_tokens", json=body())
    assert response["truncation"] == "auto"
    assert len(engine.sent["messages"]) == 3
    assert counted.status_code == 501


async def test_a_stream_of_text_alone(engine: FakeEngine) -> None:
    """Comments of the engine stay comments."""
    answer = chat_stream("Hel", "lo.")
    engine.answers.append(
        Answer(
            [b": hello\n\n", *answer.chunks[:2], b": wait\n\n", *answer.chunks[2:]],
            content_type=SSE,
        )
    )
    async with proxy_before(engine) as client:
        found = await client.post(RESPONSES, json=body(stream=True))
    assert found.text.count(": wait\n\n") == 1
    text = "\n\n".join(part for part in found.text.split("\n\n") if not part.startswith(":"))
    deltas = [e["delta"] for e in events(text) if e["type"] == "response.output_text.delta"]
    assert deltas == ["Hel", "lo."]
