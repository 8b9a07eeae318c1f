"""Tool calls of streams in every spelling of engines and gateways, against the whole answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from anthropic.types import Message
from anthropic_talks import events_of, read
from hypothesis import given
from hypothesis import strategies as st
from support.call_dialects import INDICES, Delta, spelled
from support.linear import check_linear
from support.responses_talks import completion, piece, streamed
from support.responses_talks import whole as whole_response

from leyline_proxy.apis.anthropic.answer import map_answer, map_usage
from leyline_proxy.apis.recall_calls import RecallScreen, asked_in, without_calls
from leyline_proxy.apis.streamed_calls import StreamedCalls
from leyline_proxy.model.asides import RECALL_TOOL


def whole_message(message: Delta) -> Message:
    """A whole answer as Anthropic's message, as the SDK reads it."""
    mapped = map_answer(completion(message, "tool_calls"), message_id="msg_1", stop_sequences=())
    usage = map_usage({"prompt_tokens": 9, "completion_tokens": 3}, None)
    return Message.model_validate(mapped | {"usage": usage})


def parsed(item: Delta) -> Delta:
    """An item with its arguments as a value, for spaces don't matter."""
    if "arguments" not in item:
        return item
    return {**item, "arguments": json.loads(item["arguments"])}


@pytest.mark.parametrize("index", INDICES)
@given(data=st.data())
def test_a_message_has_the_calls_of_the_whole_answer(index: str, data: st.DataObject) -> None:
    """Its blocks follow one another, however the engine cut and mixed the calls."""
    message, chunks = data.draw(spelled(index))
    assert read(events_of(chunks)) == whole_message(message)


@pytest.mark.parametrize("index", INDICES)
@given(data=st.data())
def test_a_response_has_the_calls_of_the_whole_answer(index: str, data: st.DataObject) -> None:
    """Its items keep their order, and none is done before it is whole."""
    message, chunks = data.draw(spelled(index))
    events, response = streamed(chunks)
    expected = whole_response(message, "tool_calls")["output"]
    assert [*map(parsed, response["output"])] == [*map(parsed, expected)]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert sorted(item["id"] for item in done) == sorted(item["id"] for item in expected)
    for item in done:
        assert parsed(item) in map(parsed, expected)
    added = [event for event in events if event["type"] == "response.output_item.added"]
    assert [event["output_index"] for event in added] == [*range(len(expected))]


@pytest.mark.parametrize("index", INDICES)
@given(data=st.data())
def test_recalls_are_taken_out_of_any_spelling(index: str, data: st.DataObject) -> None:
    """The proxy reads them as in the whole answer, and the client gets its own calls alone."""
    names = st.sampled_from([RECALL_TOOL, RECALL_TOOL, "ls", "leyline"])
    message, chunks = data.draw(spelled(index, names=names))
    screen, shown = RecallScreen(), []
    for each in chunks:
        for choice in each["choices"]:
            last = bool(choice["finish_reason"])
            delta = screen.feed(choice["delta"], last=last)
            shown.append({**each, "choices": [{**choice, "delta": delta or {}}]})
    whole, asked = asked_in(completion(message)), screen.asked
    assert (asked is None) == (whole is None)
    if asked is not None and whole is not None:
        places = [(call.place, json.loads(call.arguments or "null")) for call in asked.calls]
        assert places == [
            (call.place, json.loads(call.arguments or "null")) for call in whole.calls
        ]
        assert (asked.text, asked.reasoning) == (whole.text, whole.reasoning)
    kept = without_calls(completion(message, "stop"))["choices"][0]["message"]
    _, response = streamed(shown)
    expected = whole_response(kept, "stop")["output"]
    assert [
        (item["name"], json.loads(item["arguments"]))
        for item in response["output"]
        if item["type"] == "function_call"
    ] == [
        (item["name"], json.loads(item["arguments"]))
        for item in expected
        if item["type"] == "function_call"
    ]


def part(index: int | None, name: str = "", arguments: Any = None, **members: Any) -> Delta:
    """A part of one call."""
    function = {"name": name} if arguments is None else {"name": name, "arguments": arguments}
    return {"index": index, "function": function, **members}


def test_the_open_call_streams_and_the_others_wait() -> None:
    """A block of Anthropic's begins once the one before it is whole; text between calls waits,
    too."""
    chunks = [
        piece({"tool_calls": [part(0, "a", '{"x":'), part(1, "b", '{"y":')]}),
        piece({"content": "text"}),
        piece({"tool_calls": [part(1, "", "2}")]}),
        piece({"tool_calls": [part(0, "", "1}")]}),
        piece({}, "tool_calls"),
    ]
    blocks = read(events_of(chunks)).content
    assert [block.type for block in blocks] == ["tool_use", "tool_use", "text"]
    first, second, _ = blocks
    assert first.type == second.type == "tool_use"
    assert (first.input, second.input) == ({"x": 1}, {"y": 2})
    kinds = [(event["type"], event.get("index")) for event in events_of(chunks)]
    assert kinds[2:4] == [("content_block_start", 0), ("content_block_delta", 0)]


def test_an_item_isnt_done_with_half_its_arguments() -> None:
    """A response's calls grow in turn, and each ends whole."""
    chunks = [
        piece({"tool_calls": [part(0, "a", '{"x":'), part(1, "b", '{"y":')]}),
        piece({"tool_calls": [part(1, "", "2}"), part(0, "", "1}")]}),
        piece({}, "tool_calls"),
    ]
    events, response = streamed(chunks)
    assert [item["arguments"] for item in response["output"]] == ['{"x":1}', '{"y":2}']
    done = [event["type"] for event in events if event["type"].endswith("arguments.done")]
    assert len(done) == 2


@pytest.mark.parametrize(
    ("delta", "text", "reasoning"),
    [
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "ab", ""),
        ({"content": ["a", {"type": "output_text", "text": "b"}]}, "ab", ""),
        (
            {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "h"}]}]},
            "",
            "h",
        ),
        ({"content": [{"type": "thinking", "thinking": "h"}]}, "", "h"),
        ({"reasoning": "h", "reasoning_content": ""}, "", "h"),
        ({"reasoning": "h", "reasoning_content": "h"}, "", "h"),
        ({"reasoning_details": [{"type": "reasoning.text", "text": "h"}]}, "", "h"),
        ({"content": [None, 7, {"type": "image"}], "reasoning": {}}, "", ""),
    ],
)
def test_texts_in_lists_are_kept(delta: Delta, text: str, reasoning: str) -> None:
    """In streams and whole answers, reasoning under each of its names."""
    chunks = [piece(delta), piece({}, "stop")]
    _, response = streamed(chunks)
    for output in (response["output"], whole_response(delta)["output"]):
        said = {item["type"]: item["content"][0]["text"] for item in output if item["content"]}
        assert (said.get("message", ""), said.get("reasoning", "")) == (text, reasoning)
    expected = whole_message({**delta, "tool_calls": []}).content
    assert read(events_of(chunks)).content == expected


@pytest.mark.parametrize(
    "said",
    [
        {"function_call": {"name": "ls", "arguments": "{}"}},
        {"tool_calls": {"function": {"name": "ls", "arguments": {}}}},
        {"tool_calls": [{"function": {"name": "ls"}}]},
    ],
)
def test_a_call_in_another_form_is_one(said: Delta) -> None:
    """OpenAI's first form, one outside a list, and one without arguments."""
    _, response = streamed([piece(said), piece({}, "function_call")])
    for output in (response["output"], whole_response(said)["output"]):
        (call,) = output
        assert (call["type"], call["name"], call["arguments"]) == ("function_call", "ls", "{}")
    assert whole_message(said).stop_reason == "tool_use"
    (block,) = read(events_of([piece(said), piece({}, "stop")])).content
    assert block.type == "tool_use"
    assert block.input == {}


def test_a_whole_message_in_a_stream_is_its_answer() -> None:
    """A gateway whose engine doesn't stream sends one chunk with a message."""
    chunk = {"choices": [{"index": 0, "message": {"content": "a"}, "finish_reason": "stop"}]}
    assert [block.type for block in read(events_of([chunk])).content] == ["text"]


@pytest.mark.parametrize("again", [{}, {"id": "fresh"}, {"id": "c"}])
def test_parts_are_read_in_linear_time(again: Delta) -> None:
    """Arguments in many parts cost as many steps, whatever the parts repeat."""

    def work_on(size: int) -> Callable[[], object]:
        parts = [part(0, "", '{"a": "b') for _ in range(size)]

        def work() -> None:
            calls = StreamedCalls()
            calls.take({**part(0, "ls", "{"), "id": "c"})
            for each in parts:
                taken = calls.take({**each, **again})
                assert taken is not None and taken[0].number == 0

        return work

    check_linear(work_on, 2000)
