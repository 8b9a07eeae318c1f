"""Chunks of engines as events of responses."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from support.responses_talks import Talk, answers, chunked, opening, piece, streamed

from leyline_proxy.apis.chat_answers import AnswerError
from leyline_proxy.apis.responses.stream import ResponseEvents

_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def kinds(events: Talk) -> list[str]:
    """Types without what all begin with."""
    return [event["type"].removeprefix("response.") for event in events]


@given(st.data(), answers(breaks_off=True), st.booleans())
def test_every_event_is_one_of_the_sdks(
    data: st.DataObject, message: dict[str, Any], carries: bool
) -> None:
    """Checked against its types; numbered without a gap, and of an item only between its beginning
    and its end."""
    events, _ = streamed(data.draw(chunked(message)), carries=carries)
    opened: dict[str, int] = {}
    done: set[str] = set()
    for number, event in enumerate(events):
        _EVENT.validate_python(event)
        assert event["sequence_number"] == number
        if event["type"] == "response.output_item.added":
            assert event["output_index"] == len(opened)
            opened[event["item"]["id"]] = event["output_index"]
        elif event["type"] == "response.output_item.done":
            assert opened[event["item"]["id"]] == event["output_index"]
            done.add(event["item"]["id"])
        elif "item_id" in event:
            assert opened[event["item_id"]] == event["output_index"]
            assert event["item_id"] not in done
    assert done == opened.keys()
    assert kinds(events)[:2] == ["created", "in_progress"]
    assert kinds(events)[-1] == "completed"


@given(st.data(), answers(breaks_off=True))
def test_deltas_add_up_to_what_is_done(data: st.DataObject, message: dict[str, Any]) -> None:
    """This holds for texts, reasoning, arguments and inputs."""
    events, _ = streamed(data.draw(chunked(message)))
    heard: dict[str, str] = {}
    done: dict[str, str] = {}
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind.endswith(".delta"):
            heard[event["item_id"]] = heard.get(event["item_id"], "") + event["delta"]
        elif kind.endswith(".done") and "item_id" in event and "part" not in event:
            (text,) = (event[name] for name in ("text", "arguments", "input") if name in event)
            done[event["item_id"]] = text
    assert {key: text for key, text in done.items() if text or key in heard} == heard


def test_the_order_of_the_api() -> None:
    """Reasoning, a message and a call, each opened, filled and done in turn."""
    call = {"index": 0, "id": "c1", "function": {"name": "ls", "arguments": ""}}
    chunks = [
        piece({"role": "assistant", "content": ""}),
        piece({"reasoning_content": "Hm."}),
        piece({"content": "I "}),
        piece({"content": "look."}),
        piece({"tool_calls": [call]}),
        piece({"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}),
        piece({}, "tool_calls", leyline={"turn": "t0"}),
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}},
    ]
    events, response = streamed(chunks)
    assert kinds(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert response["leyline"] == {"turn": "t0"}
    assert response["usage"]["total_tokens"] == 5
    assert [item["status"] for item in response["output"]] == ["completed"] * 3


def test_a_custom_tools_input_comes_as_text() -> None:
    """It doesn't come as the JSON that the engine writes; a local shell's call comes whole."""
    patch = {"index": 0, "id": "c1", "function": {"name": "patch", "arguments": '{"input": "'}}
    shell = {
        "index": 1,
        "id": "c2",
        "function": {"name": "local_shell", "arguments": '{"command": ["ls"]}'},
    }
    more = {"index": 0, "function": {"arguments": 'a\\nb"}'}}
    chunks = [piece({"tool_calls": [each]}) for each in (patch, more, shell)]
    events, response = streamed([*chunks, piece({}, "stop")])
    assert kinds(events)[2:-1] == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
        "output_item.added",
        "output_item.done",
    ]
    assert response["output"][0]["input"] == events[3]["delta"] == "a\nb"
    assert response["output"][1]["action"]["command"] == ["ls"]


def test_an_answer_that_was_cut_off_is_incomplete() -> None:
    """The last event says so, and why; so does the item that was under way."""
    events, response = streamed([piece({"content": "a"}), piece({}, "length")])
    assert kinds(events)[-1] == response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"


def test_a_refusal_is_a_part_behind_the_text() -> None:
    """It has events of its own."""
    events, response = streamed([piece({"content": "a", "refusal": "No."}), piece({}, "stop")])
    assert [part["type"] for part in response["output"][0]["content"]] == ["output_text", "refusal"]
    done = [event for event in events if event["type"] == "response.refusal.done"]
    assert (done[0]["refusal"], done[0]["content_index"]) == ("No.", 1)


@pytest.mark.parametrize(
    ("status", "code"),
    [(400, "invalid_prompt"), (429, "rate_limit_exceeded"), (502, "server_error")],
)
def test_a_failure_ends_the_response(status: int, code: str) -> None:
    """It ends with an error and a response that has the work so far; nothing comes after it."""
    events = ResponseEvents(opening())
    before = [*events.feed(piece({"content": "a"})), *events.feed(piece({"reasoning": "b"}))]
    error, last = events.fail(status, "It broke.", code="c", param=None)
    assert (error["type"], error["message"], error["code"]) == ("error", "It broke.", "c")
    assert error["sequence_number"] == len(before)
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": code, "message": "It broke."}
    assert [item["type"] for item in last["response"]["output"]] == ["message"]
    for event in (error, last):
        _EVENT.validate_python(event)
    assert [*events.fail(500, "x", code=None, param=None), *events.close()] == []
    assert events.response is None


@pytest.mark.parametrize(
    "chunks",
    [
        [piece({"content": "a"})],
        [piece({"tool_calls": [{"index": 0, "id": "c1"}]}), piece({}, "tool_calls")],
        [
            piece({"tool_calls": [{"index": 0, "function": {"name": "ls", "arguments": "{}"}}]}),
            piece({"tool_calls": [{"index": 1, "function": {"name": "ls", "arguments": "{}"}}]}),
            piece({"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}),
            piece({}, "tool_calls"),
        ],
    ],
)
def test_what_cant_be_told_is_an_error(chunks: Talk) -> None:
    """No end, a call without a name, arguments that go on after their end."""
    with pytest.raises(AnswerError):
        streamed(chunks)


@given(st.data(), answers(breaks_off=True))
def test_ids_are_stable_and_unique(data: st.DataObject, message: dict[str, Any]) -> None:
    """An item keeps its id from its first event to the last response."""
    events, response = streamed(data.draw(chunked(message)))
    added = [e["item"]["id"] for e in events if e["type"] == "response.output_item.added"]
    assert added == [item["id"] for item in response["output"]]
    assert len(set(added)) == len(added)
