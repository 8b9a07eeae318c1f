"""``/v1/responses`` before a scripted engine: what goes upstream, and what comes back."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from messages_kit import SSE, events, kinds, metric
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

RESPONSES = "/v1/responses"
LS = {"type": "function", "name": "ls", "parameters": {"type": "object"}}
CALL = {"type": "function_call", "call_id": "c1", "name": "ls", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "b.py"}
USER = {"role": "user", "content": "List."}
TWO = ("red:r", "blue:b")


def body(given: Any = "Hello.", **members: Any) -> dict[str, Any]:
    """A request."""
    return {"model": MODEL, "input": given, **members}


def key(name: str) -> dict[str, str]:
    """A tenant's headers."""
    return {"authorization": f"Bearer {name}"}


async def ask(client: httpx.AsyncClient, given: Any = "Hello.", **members: Any) -> dict[str, Any]:
    """A response."""
    answer = await client.post(RESPONSES, json=body(given, **members))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.fixture
def engine() -> FakeEngine:
    """The scripted engine."""
    return FakeEngine()


async def test_the_engine_gets_a_chat_request(engine: FakeEngine) -> None:
    """With the proxy's envelope, and without what is between the client and OpenAI."""
    headers = {
        "openai-organization": "o",
        "x-codex-turn-metadata": "{}",
        "authorization": "Bearer secret",
        "x-trace": "t",
    }
    async with proxy_before(engine) as client:
        asked = body([USER, CALL, RESULT], instructions="Be terse.", tools=[LS], priority=9)
        answer = await client.post(RESPONSES, json=asked, headers=headers)
        assert await metric(client, f'route="{RESPONSES}"', 'status="200"') == 1
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


def scripted(**members: Any) -> Answer:
    """A stream with reasoning, text and a call; usage comes behind the finish chunk."""
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
    parts = [*map(chunk, deltas), chunk({}, "tool_calls"), last, DONE]
    return Answer(parts, content_type=SSE, **members)


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


@settings(max_examples=30)
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


async def test_a_request_goes_on_from_a_stored_response(engine: FakeEngine) -> None:
    """The engine is sent the whole conversation, and the session goes on, also with other
    instructions and beside a user who has several conversations."""
    engine.answers.append(scripted())
    async with proxy_before(engine) as client:
        one = events((await client.post(RESPONSES, json=body([USER], stream=True))).text)
        first = one[-1]["response"]
        second = await ask(client, [RESULT], previous_response_id=first["id"], user="u")
        third = await ask(
            client, "More?", previous_response_id=second["id"], instructions="Be terse.", user="u"
        )
        listed = (await client.get(f"{RESPONSES}/{third['id']}/input_items?order=asc")).json()
    assert [m["role"] for m in engine.sent["messages"]] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
    ]
    assert engine.sent["messages"][2]["reasoning_content"] == "Hm."
    sessions = {each["leyline"]["session"] for each in (first, second, third)}
    assert len(sessions) == 1
    assert third["leyline"]["turn_index"] == 2
    assert third["previous_response_id"] == second["id"]
    assert [item["type"] for item in listed["data"]] == [
        "message",
        "reasoning",
        "message",
        "function_call",
        "function_call_output",
        "message",
        "message",
    ]
    assert len({item["id"] for item in listed["data"]}) == 7


async def test_a_header_names_the_session_where_there_is_one(engine: FakeEngine) -> None:
    """The client's own choice goes before the response that it goes on from."""
    async with proxy_before(engine) as client:
        first = await ask(client)
        asked = body("More?", previous_response_id=first["id"])
        other = await client.post(RESPONSES, json=asked, headers={"x-leyline-session": "mine"})
    assert other.json()["leyline"]["session"] == "mine"


async def test_items_may_be_referred_to(engine: FakeEngine) -> None:
    """By the ids that answers gave them; the stored input has the items themselves."""
    async with proxy_before(engine) as client:
        first = await ask(client, [USER])
        item = first["output"][0]["id"]
        again = [USER, {"type": "item_reference", "id": item}, {"role": "user", "content": "More?"}]
        second = await ask(client, again)
        listed = (await client.get(f"{RESPONSES}/{second['id']}/input_items")).json()
        for lost in (item.replace("msg", "rs"), "msg_of_another_house"):
            asked = body([USER, {"id": lost}])
            refused = await client.post(RESPONSES, json=asked)
            assert refused.status_code == 404
            assert refused.json()["error"]["param"] == "input[1].id"
    assert [m["content"] for m in engine.sent["messages"]] == ["List.", "Hello.", "More?"]
    assert [item["type"] for item in listed["data"]] == ["message"] * 3


async def test_store_false_stores_nothing(engine: FakeEngine) -> None:
    """Neither whole nor streamed; nor does a proxy that is to keep none."""
    async with proxy_before(engine) as client:
        whole = await ask(client, store=False)
        streamed = await client.post(RESPONSES, json=body(store=False, stream=True))
        last = events(streamed.text)[-1]["response"]
        for response in (whole, last):
            assert response["store"] is False
            assert (await client.get(f"{RESPONSES}/{response['id']}")).status_code == 404
    async with proxy_before(engine, max_stored_responses=0) as client:
        kept = await ask(client)
        assert (await client.get(f"{RESPONSES}/{kept['id']}")).status_code == 404


async def test_tenants_dont_see_each_others_responses(engine: FakeEngine) -> None:
    """To read, to go on from, to refer to, to list, to delete: it isn't there."""
    async with proxy_before(engine, api_keys=TWO) as client:
        first = (await client.post(RESPONSES, json=body(), headers=key("r"))).json()
        path = f"{RESPONSES}/{first['id']}"
        onward = body("More?", previous_response_id=first["id"])
        referring = body([USER, {"type": "item_reference", "id": first["output"][0]["id"]}])
        refused = [
            await client.get(path, headers=key("b")),
            await client.get(f"{path}/input_items", headers=key("b")),
            await client.delete(path, headers=key("b")),
            await client.post(RESPONSES, json=referring, headers=key("b")),
            await client.post(RESPONSES, json=onward, headers=key("b")),
        ]
        assert [answer.status_code for answer in refused] == [404] * 5
        error = refused[-1].json()["error"]
        assert (error["code"], error["param"]) == (
            "previous_response_not_found",
            "previous_response_id",
        )
        assert (await client.get(path)).status_code == 401
        assert (await client.get(path, headers=key("r"))).json() == first
        mine = await client.post(RESPONSES, json=onward, headers=key("r"))
        assert mine.json()["leyline"]["session"] == first["leyline"]["session"]
    assert len(engine.bodies) == 2


async def test_a_deleted_response_is_gone_for_all_that_go_on_from_it(engine: FakeEngine) -> None:
    """Its text isn't in any other stored response."""
    async with proxy_before(engine) as client:
        first = await ask(client, "The password is swordfish.")
        second = await ask(client, "More?", previous_response_id=first["id"])
        deleted = (await client.delete(f"{RESPONSES}/{first['id']}")).json()
        assert deleted == {"id": first["id"], "object": "response", "deleted": True}
        onward = await client.post(RESPONSES, json=body("And?", previous_response_id=second["id"]))
        listed = await client.get(f"{RESPONSES}/{second['id']}/input_items")
        kept = await client.get(f"{RESPONSES}/{second['id']}")
    assert onward.status_code == listed.status_code == 404
    assert "swordfish" not in kept.text


async def test_policies_see_stored_items_on_every_turn(engine: FakeEngine) -> None:
    """What they take out never goes upstream; the stored copy is its owner's, as it was sent."""
    policy = "redact:patterns=[swordfish]"
    async with proxy_before(engine, policy=policy) as client:
        first = await ask(client, "The password is swordfish.")
        second = await ask(client, "More?", previous_response_id=first["id"])
        listed = await client.get(f"{RESPONSES}/{second['id']}/input_items")
    assert len(engine.bodies) == 2
    assert not [sent for sent in engine.bodies if b"swordfish" in sent]
    assert [m["role"] for m in engine.sent["messages"]] == ["user", "assistant", "user"]
    assert "swordfish" in listed.text


async def test_a_conversation_is_bounded(engine: FakeEngine) -> None:
    """By what one request may hold: storing it part by part is no way around."""
    async with proxy_before(engine, max_body_bytes=4096) as client:
        previous = None
        for _ in range(2):
            previous = (await ask(client, "x" * 3000, previous_response_id=previous))["id"]
        refused = await client.post(RESPONSES, json=body(previous_response_id=previous))
    assert refused.status_code == 413
    assert refused.json()["error"]["param"] == "previous_response_id"


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("?stream=true", "stream"),
        ("/input_items?limit=0", "limit"),
        ("/input_items?after=x", "after"),
    ],
)
async def test_wrong_parameters_are_named(engine: FakeEngine, path: str, param: str) -> None:
    """Of the routes of stored responses."""
    async with proxy_before(engine) as client:
        first = await ask(client)
        refused = await client.get(f"{RESPONSES}/{first['id']}{path}")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


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
        (404, json.dumps(body(model="gone")).encode(), "model"),
        (404, json.dumps(body(previous_response_id="resp_1")).encode(), "previous_response_id"),
        (400, b'{"model":"m","input":' + b"[" * 5000 + b"]" * 5000 + b"}", None),
        (400, json.dumps(body(metadata=[[[[[]]]]], input=None)).encode(), "input"),
    ],
)
async def test_mistakes_are_told_in_the_clients_terms(
    engine: FakeEngine, status: int, asked: bytes, param: str | None
) -> None:
    """In OpenAI's shape, before anything goes upstream."""
    async with proxy_before(engine) as client:
        headers = {"content-type": "application/json"}
        answer = await client.post(RESPONSES, content=asked, headers=headers)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error.keys() >= {"message", "type", "param", "code"}
    assert (error["param"] or "").startswith(param or "")
    assert engine.bodies == []


async def test_the_engines_refusal_keeps_its_words(engine: FakeEngine) -> None:
    """And its code; places are the client's."""
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
    """With an error and a failed response as its last events; nothing is stored."""
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
    """Before the turn counts, and nothing is stored."""
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


async def test_tokens_that_cant_be_counted(engine: FakeEngine) -> None:
    """Where the engine's template isn't known, truncation leaves it to the engine, and a count
    isn't made up."""
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
