"""Records that come with their answers: the client sees what it saw, and nothing is asked for."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.fake_engine import (
    CAPABILITY,
    DONE,
    MODEL,
    Answer,
    FakeEngine,
    chat_json,
    chat_stream,
    chunk,
    proxy_before,
)
from support.messages_route import MESSAGES, SSE
from support.responses_route import RESPONSES

from leyline_engine.contract import RECORD_MEMBER, Receipt, TurnRecord, with_receipts_in_answers
from leyline_proxy.request.wire import take_member

CHAT = "/v1/chat/completions"
REQUEST = {"model": MODEL, "messages": [{"role": "user", "content": "Hi."}]}
SESSION = {"x-leyline-session": "s"}
ANNOUNCED = with_receipts_in_answers(CAPABILITY)
USAGE = chunk({}, usage={"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12})
CALL = {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "ls", "arguments": "{"}}]}


def streamed(*events: bytes, **options: Any) -> Answer:
    return Answer(events, content_type=SSE, **options)


ANSWERS = {
    "whole": chat_json(RECORD_MEMBER + '": {}'),
    "white space": Answer([chat_json().chunks[0].replace(b"}", b" }\n") + b"\n"]),
    "stream": chat_stream("Hel", "lo."),
    "usage behind": streamed(chunk({"content": "a"}), chunk({}, "length"), USAGE, DONE),
    "two choices": streamed(chunk({"content": "a"}), chunk({}, "stop"), chunk({}, "stop"), DONE),
    "a tool": streamed(chunk(CALL), chunk({}, "tool_calls"), DONE),
    "all at once": streamed(chunk({"content": "a"}, "stop") + USAGE + DONE),
    "keep-alives": streamed(b": hi\n\n", chunk({"content": "a"}), b": hi\n\n", chunk({}, "stop")),
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
async def test_the_client_gets_the_engines_bytes_and_the_account(answer: Answer) -> None:
    """Less the account, they are those that the engine wrote before it added the record."""
    engine = FakeEngine(capability=ANNOUNCED)
    engine.answers = [answer]
    stream = answer.content_type == SSE
    async with proxy_before(engine) as client:
        got = await client.post(CHAT, json={**REQUEST, "stream": stream})
        text = (await client.get("/metrics")).text
    assert got.status_code == 200
    assert engine.asked == []
    accounts, left = [], b""
    for event in got.content.split(b"\n\n") if stream else [got.content]:
        start = event.find(b"{")
        data, account = take_member(event[start:], "leyline") if start >= 0 else (b"", None)
        accounts += [json.loads(account)] if account is not None else []
        left += (event[:start] + data if start >= 0 else event) + (b"\n\n" if stream else b"")
    assert left.removesuffix(b"\n\n" if stream else b"") == b"".join(answer.chunks)
    (account,) = accounts
    assert account["tokens"]["prefix"] == 4
    assert f'"{RECORD_MEMBER}":{{' not in got.text
    came = [
        (sample.labels["came"], sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "leyline_receipts_total"
    ]
    assert came == [("answer", 1)]


OTHERS = {
    "another turn's": TurnRecord(receipt=Receipt(message_id="m-other"), finished=True),
    "unfinished": None,
    "no record": {"receipt": 3},
    "no object": "leyline",
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
async def test_what_isnt_the_turns_record_is_taken_out_and_asked_for(
    other: object, stream: bool
) -> None:
    """The side channel stays for it; the client sees nothing of either."""
    engine = FakeEngine(capability=ANNOUNCED)

    def completed(part: bytes, message_id: str) -> bytes:
        record = TurnRecord(receipt=Receipt(message_id=message_id)) if other is None else other
        encoded = msgspec.json.encode(record)
        end = part.rindex(b"}")
        return part[:end] + b',"%b":%b' % (RECORD_MEMBER.encode(), encoded) + part[end:]

    engine.completed = completed  # type: ignore[method-assign]
    async with proxy_before(engine) as client:
        got = await client.post(CHAT, json={**REQUEST, "stream": stream})
    assert RECORD_MEMBER not in got.text and '"prefix":4' in got.text
    assert len(engine.asked) == 1


@pytest.mark.parametrize("announced", [False, True])
async def test_only_an_engine_that_announces_it_is_asked_for_it(announced: bool) -> None:
    """An older one gets the envelope that it knows."""
    engine = FakeEngine(capability=ANNOUNCED if announced else CAPABILITY)
    async with proxy_before(engine) as client:
        assert (await client.post(CHAT, json=REQUEST)).status_code == 200
    kinds = [each["action_type"] for each in engine.sent["custom_params"]["kv_hints"]["actions"]]
    assert kinds == ["leyline.edit", "leyline.receipt"][: 1 + announced]
    assert len(engine.asked) == (0 if announced else 1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (MESSAGES, {"model": MODEL, "max_tokens": 9, "messages": REQUEST["messages"]}),
        (RESPONSES, {"model": MODEL, "input": "Hi."}),
    ],
)
async def test_the_other_apis_show_nothing_of_it(
    path: str, body: dict[str, Any], stream: bool
) -> None:
    """Their answers are translated, and their turns accounted all the same."""
    engine = FakeEngine(capability=ANNOUNCED)
    async with proxy_before(engine) as client:
        got = await client.post(path, json={**body, "stream": stream})
    assert got.status_code == 200 and RECORD_MEMBER not in got.text
    assert '"prefix":4' in got.text and engine.asked == []


async def test_a_stream_that_ends_in_an_error_brings_none() -> None:
    """The turn isn't settled, whatever came before the error."""
    engine = FakeEngine(capability=ANNOUNCED)
    error = b'data: {"error": {"message": "no", "code": 500}}\n\n'
    engine.answers = [streamed(chunk({"content": "a"}), error, DONE)]
    async with proxy_before(engine) as client:
        got = await client.post(CHAT, json={**REQUEST, "stream": True}, headers=SESSION)
        session = await client.get("/v1/leyline/sessions/s")
    assert got.content.endswith(error + DONE)
    assert session.status_code == 404 and engine.asked == []
