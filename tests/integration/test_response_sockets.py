"""Responses over WebSocket: the proxy's own server, the embedded engine and a real client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from support.messages_route import events, kinds
from support.sockets import LAST, SocketProxy, socket_proxy
from websockets.exceptions import InvalidStatus

from leyline_proxy.upstream.embedded import create_embedded_engine

RED, BLUE = "key-of-the-red-tenant", "key-of-the-blue-tenant"
MODEL = "leyline-recall"
TOOL = "".join(f"{number:04d} drwxr-xr-x build/module_{number}\n" for number in range(30))
SHORT = {"model": MODEL, "max_output_tokens": 4, "temperature": 0}
UNKEPT = {**SHORT, "store": False}


@pytest.fixture(scope="module")
def proxy() -> Iterator[SocketProxy]:
    """Proxy and engine, for two tenants."""
    engine = create_embedded_engine("replay", {"pool_tokens": 32_768, "device": "cpu"})
    keys = (f"red:{RED}", f"blue:{BLUE}")
    with socket_proxy(engine, api_keys=keys, log_level="error") as running:
        yield running


def http(key: str) -> httpx.AsyncClient:
    """A client over HTTP."""
    headers = {"authorization": f"Bearer {key}"}
    return httpx.AsyncClient(headers=headers, timeout=60)


def plain(found: list[dict[str, Any]]) -> Any:
    """Events without ids, times, the account and what was cached, which differ from run to run."""
    key = found[0]["response"]["id"].removeprefix("resp_")
    response = found[-1]["response"]
    del response["leyline"], response["usage"]["input_tokens_details"]
    for event in found:
        if "response" in event:
            del event["response"]["created_at"]
    return json.loads(json.dumps(found).replace(key, "KEY"))


async def test_the_events_are_those_of_a_stream_over_http(proxy: SocketProxy) -> None:
    """Type by type and member by member, except for ids, times and the account."""
    asked = {**SHORT, "input": "Say it.", "instructions": "Be terse.", "stream": True}
    async with http(RED) as client:
        streamed = await client.post(f"{proxy.origin}/v1/responses", json=asked)
    async with proxy.socket(RED) as socket:
        await socket.create("Say it.", **SHORT, instructions="Be terse.")
        framed = await socket.events()
    assert kinds(framed)[0] == "response.created"
    assert framed[-1]["response"]["usage"]["output_tokens"] == 4
    assert framed[-1]["response"]["leyline"]["session"]
    assert plain(framed) == plain(events(streamed.text))


@pytest.mark.parametrize("store", [True, False])
async def test_a_conversation_continues_from_its_last_response(
    proxy: SocketProxy, store: bool
) -> None:
    """Each request holds only what is new; all are turns of one session, whose KV is reused."""
    task = f"Look into the folders, {'kept' if store else 'not kept'}. " * 8
    async with proxy.socket(RED) as socket:
        first = await socket.ask(task, **SHORT, store=store)
        call = {"type": "function_call", "call_id": "c1", "name": "ls", "arguments": "{}"}
        result = {"type": "function_call_output", "call_id": "c1", "output": TOOL}
        options = {**SHORT, "store": store}
        second = await socket.ask([call, result], previous_response_id=first["id"], **options)
        third = await socket.ask("And now?", previous_response_id=second["id"], **options)
        again = await socket.ask("Or else?", previous_response_id=second["id"], **options)
    accounts = [each["leyline"] for each in (first, second, third, again)]
    assert len({account["session"] for account in accounts}) == 1
    assert [account["turn_index"] for account in accounts] == [0, 1, 2, 3]
    used = [each["usage"]["input_tokens"] for each in (first, second, third)]
    assert used[0] < used[1] < used[2]
    cached = third["usage"]["input_tokens_details"]["cached_tokens"]
    assert cached >= used[1] - 16, (cached, used)
    assert accounts[3]["tokens"]["prompt"] > used[1]


async def test_only_stored_responses_outlive_their_connection(proxy: SocketProxy) -> None:
    """Another connection and the HTTP route find a stored one, and no other."""
    async with proxy.socket(RED) as socket:
        kept = await socket.ask(**SHORT)
        gone = await socket.ask(**UNKEPT)
        assert await socket.ask("More.", previous_response_id=gone["id"], **UNKEPT)
    async with proxy.socket(RED) as socket:
        await socket.ask("More.", previous_response_id=kept["id"], **SHORT)
        error = await socket.refused("More.", previous_response_id=gone["id"], **SHORT)
    async with http(RED) as client:
        urls = [f"{proxy.origin}/v1/responses/{each['id']}" for each in (kept, gone)]
        found = [(await client.get(url)).status_code for url in urls]
    assert found == [200, 404]
    assert (error["status"], error["error"]["code"]) == (400, "previous_response_not_found")
    assert error["error"]["param"] == "previous_response_id"


async def test_a_connection_cannot_continue_what_another_holds(proxy: SocketProxy) -> None:
    """Neither one of the same tenant while it is open, nor one of another tenant."""
    async with proxy.socket(RED) as mine, proxy.socket(RED) as beside, proxy.socket(BLUE) as other:
        held = await mine.ask(**UNKEPT)
        kept = await mine.ask(**SHORT)
        codes = [
            (await each.refused(previous_response_id=one["id"], **SHORT))["error"]["code"]
            for each, one in ((beside, held), (other, held), (other, kept))
        ]
        await beside.ask("More.", previous_response_id=kept["id"], **SHORT)
    assert codes == ["previous_response_not_found"] * 3


async def test_a_request_may_be_prepared_first(proxy: SocketProxy) -> None:
    """With generate: false no engine is asked; the next request continues from that input."""
    async with proxy.socket(RED) as socket:
        await socket.create("Remember the word plum.", **UNKEPT, generate=False)
        found = await socket.events()
        assert kinds(found) == ["response.created", "response.completed"]
        ready = found[-1]["response"]
        assert (ready["output"], ready["usage"]["total_tokens"]) == ([], 0)
        empty = await socket.ask([], **UNKEPT, generate=False)
        alone = await socket.ask("Which?", previous_response_id=empty["id"], **UNKEPT)
        after = await socket.ask("Which?", previous_response_id=ready["id"], **UNKEPT)
    assert after["usage"]["input_tokens"] > alone["usage"]["input_tokens"]
    assert after["leyline"]["turn_index"] == 0


async def test_a_forgotten_session_leaves_its_connection(proxy: SocketProxy) -> None:
    """A forget with responses takes those that only the connection holds, too."""
    async with proxy.socket(RED) as socket:
        held = await socket.ask("The word is plum.", **UNKEPT)
        session = held["leyline"]["session"]
        async with http(RED) as client:
            url = f"{proxy.origin}/v1/leyline/sessions/{session}/proof"
            answer = await client.post(url, json={"responses": True})
        assert answer.status_code == 200, answer.text
        assert '"deleted":1' in answer.text.replace(" ", ""), answer.text
        error = await socket.refused("More.", previous_response_id=held["id"], **SHORT)
    assert error["error"]["code"] == "previous_response_not_found"


@pytest.mark.parametrize("key", [None, "a-key-of-nobody-at-all"])
async def test_a_connection_without_a_key_never_opens(proxy: SocketProxy, key: str | None) -> None:
    """The handshake is answered with the API's own error."""
    with pytest.raises(InvalidStatus) as refused:
        async with proxy.socket(key):
            pass
    response = refused.value.response
    assert response.status_code == 401
    assert json.loads(response.body or b"")["error"]["code"] == "invalid_api_key"


async def test_lanes_run_side_by_side(proxy: SocketProxy) -> None:
    """Requests with names of their own are under way together; each event names its lane."""
    async with proxy.socket(RED) as socket:
        for lane in ("a", "b"):
            await socket.create(
                f"Lane {lane}.", **{**UNKEPT, "max_output_tokens": 24}, stream_id=lane
            )
        found = [await socket.event()]
        while sum(event["type"] in LAST for event in found) < 2:
            found.append(await socket.event())
    order = [event["stream_id"] for event in found]
    assert set(order) == {"a", "b"}
    first_end = next(n for n, event in enumerate(found) if event["type"] in LAST)
    assert {*order[: first_end + 1]} == {"a", "b"}


async def test_requests_of_a_lane_run_in_order(proxy: SocketProxy) -> None:
    """The second begins after the first has ended."""
    async with proxy.socket(RED) as socket:
        await socket.create("One.", **UNKEPT)
        await socket.create("Two.", **UNKEPT)
        first, second = await socket.events(), await socket.events()
    for found in (first, second):
        assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert first[0]["response"]["id"] != second[0]["response"]["id"]


async def test_the_sdk_speaks_it(proxy: SocketProxy) -> None:
    """OpenAI's own client connects and reads its own types."""
    found = []
    async with (
        openai.AsyncOpenAI(base_url=f"{proxy.origin}/v1", api_key=RED) as client,
        client.responses.connect() as connection,
    ):
        await connection.response.create(
            model=MODEL, input="Say it.", max_output_tokens=4, temperature=0, store=False
        )
        async for event in connection:
            found.append(event)
            if event.type in LAST:
                break
    assert found[0].type == "response.created"
    assert found[-1].response.usage.output_tokens == 4
