"""Chat completions as messages, whole and in events; the SDK's own types and accumulator judge."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from anthropic.types import Message
from anthropic_talks import events_of, read
from hypothesis import given
from hypothesis import strategies as st
from support.responses_talks import piece as chunk

from leyline_proxy.apis.anthropic.answer import map_answer, map_usage
from leyline_proxy.apis.anthropic.request import map_request
from leyline_proxy.apis.anthropic.stream import MessageEvents
from leyline_proxy.apis.chat_answers import AnswerError

USAGE = {
    "prompt_tokens": 10,
    "completion_tokens": 4,
    "prompt_tokens_details": {"cached_tokens": 7},
    "completion_tokens_details": {"reasoning_tokens": 2},
}
CALL = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": '{"path": "a"}'}}


def answer(finish: str = "stop", /, **said: Any) -> dict[str, Any]:
    """A whole chat completion."""
    message = {"role": "assistant", "content": None, **said}
    return {"model": "m", "choices": [{"index": 0, "message": message, "finish_reason": finish}]}


def whole(document: dict[str, Any], stops: Sequence[str] = ()) -> Message:
    """The message, as the SDK reads it."""
    message = map_answer(document, message_id="msg_1", stop_sequences=stops)
    return Message.model_validate(message | {"usage": map_usage(USAGE, None)})


def call_part(index: int | None, **function: str) -> dict[str, Any]:
    """A delta of one tool call; ``id`` is the call's own."""
    identifier = function.pop("id", None)
    return {"tool_calls": [{"index": index, "id": identifier, "function": function}]}


def test_blocks_stand_in_the_order_of_generation() -> None:
    """Thinking, text, calls; the input of a call is an object."""
    message = whole(
        answer("tool_calls", reasoning_content="Hm.", content="I look.", tool_calls=[CALL])
    )
    thinking, text, use = message.content
    assert (thinking.type, text.type, use.type) == ("thinking", "text", "tool_use")
    assert thinking.type == "thinking"
    assert (thinking.thinking, bool(thinking.signature)) == ("Hm.", True)
    assert use.type == "tool_use"
    assert (use.id, use.name, use.input) == ("c1", "ls", {"path": "a"})
    assert message.stop_reason == "tool_use"


def test_an_answer_comes_back_as_it_was() -> None:
    """Sent again in the next turn, it is the message that the engine wrote."""
    said = {"content": "I look.", "reasoning_content": "Hm.", "tool_calls": [CALL]}
    message = map_answer(answer("tool_calls", **said), message_id="msg_1", stop_sequences=())
    talk = [{"role": "assistant", "content": message["content"]}]
    (back,) = map_request({"max_tokens": 1, "messages": talk}).body["messages"]
    arguments = back["tool_calls"][0]["function"].pop("arguments")
    assert json.loads(arguments) == {"path": "a"}
    calls = [{**CALL, "function": {"name": "ls"}}]
    assert back == {"role": "assistant", **said, "tool_calls": calls}


@pytest.mark.parametrize(
    ("finish", "said", "choice", "reason", "sequence"),
    [
        ("stop", {"content": "a"}, {}, "end_turn", None),
        ("length", {"content": "a"}, {}, "max_tokens", None),
        ("tool_calls", {"tool_calls": [CALL]}, {}, "tool_use", None),
        ("stop", {"tool_calls": [CALL]}, {}, "tool_use", None),
        ("length", {"tool_calls": [CALL]}, {}, "max_tokens", None),
        ("content_filter", {"content": ""}, {}, "refusal", None),
        ("stop", {"refusal": "No."}, {}, "refusal", None),
        ("stop", {"content": "a"}, {"matched_stop": "END"}, "stop_sequence", "END"),
        ("stop", {"content": "a"}, {"stop_reason": "END"}, "stop_sequence", "END"),
        ("stop", {"content": "a"}, {"matched_stop": 128009}, "end_turn", None),
        ("stop", {"content": "a"}, {"matched_stop": "<|im_end|>"}, "end_turn", None),
        ("a new one", {"content": "a"}, {}, "end_turn", None),
    ],
)
def test_why_an_answer_ended(
    finish: str, said: dict[str, Any], choice: dict[str, Any], reason: str, sequence: str | None
) -> None:
    """The same reasons in a whole answer and in a stream."""
    document = answer(finish, **said)
    document["choices"][0] |= choice
    delta = {**said, "tool_calls": [{**call, "index": 0} for call in said.get("tool_calls", ())]}
    last = chunk(delta, finish)
    last["choices"][0] |= choice
    for message in (whole(document, ["END"]), read(events_of([last], ["END"]))):
        assert (message.stop_reason, message.stop_sequence) == (reason, sequence)
        assert (message.stop_details is not None) == (reason == "refusal")


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ("", {}),
        (None, {}),
        ({"a": 1}, {"a": 1}),
        ('{"a": ', {"INVALID_JSON": '{"a": '}),
        ("[1]", {"INVALID_JSON": "[1]"}),
    ],
)
def test_the_input_of_a_call_is_an_object(arguments: Any, given: dict[str, Any]) -> None:
    """An input that is no object is wrapped in one, under the name that Anthropic advises."""
    call = {"id": "c", "function": {"name": "ls", "arguments": arguments}}
    (use,) = whole(answer("tool_calls", tool_calls=[call])).content
    assert use.type == "tool_use"
    assert use.input == given


def test_calls_without_ids_get_some() -> None:
    """Results must be able to name their calls."""
    call = {"function": {"name": "ls", "arguments": "{}"}}
    message = whole(answer("tool_calls", tool_calls=[call, call]))
    ids = {block.id for block in message.content if block.type == "tool_use"}
    assert len(ids) == 2
    assert all(ids)


def test_an_empty_answer_has_no_content() -> None:
    """An empty answer has no content, as with Anthropic's own, in a stream as well."""
    assert whole(answer(content="")).content == []
    assert read(events_of([chunk({"role": "assistant", "content": ""}, "stop")])).content == []


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"choices": []},
        {"choices": [{"index": 0, "text": "a"}]},
        {"choices": "x"},
        answer(tool_calls=[{"id": "c"}]),
        answer(tool_calls=["x"]),
    ],
)
def test_other_documents_are_no_answers(document: dict[str, Any]) -> None:
    """They are refused rather than shown as an empty message."""
    with pytest.raises(AnswerError):
        map_answer(document, message_id="msg_1", stop_sequences=())


@pytest.mark.parametrize(
    ("usage", "account", "counts"),
    [
        (USAGE, None, (3, 7, 4)),
        ({"prompt_tokens": 10, "completion_tokens": 4}, None, (10, 0, 4)),
        (
            {"prompt_tokens": 10, "completion_tokens": 4, "prompt_tokens_details": None},
            {"tokens": {"prompt": 10, "prefix": 4, "spliced": 2}},
            (4, 6, 4),
        ),
        (USAGE, {"tokens": {"prompt": 10, "prefix": 1, "spliced": 0}}, (3, 7, 4)),
        (None, {"tokens": {"prompt": 10, "prefix": 4, "spliced": 0}}, (6, 4, 0)),
        ({"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 9}}, None, (0, 3, 0)),
        ({"prompt_tokens": "x", "prompt_tokens_details": {"cached_tokens": "y"}}, None, (0, 0, 0)),
        (None, None, (0, 0, 0)),
    ],
)
def test_input_tokens_are_those_that_were_not_cached(
    usage: Any, account: Any, counts: tuple[int, int, int]
) -> None:
    """If the engine doesn't say how much was cached, its receipt does."""
    mapped = map_usage(usage, account)
    names = ("input_tokens", "cache_read_input_tokens", "output_tokens")
    assert tuple(mapped[name] for name in names) == counts
    assert mapped["cache_creation_input_tokens"] == 0


PIECES = st.lists(st.text(alphabet='ab "\\\n€😀', min_size=1, max_size=5), max_size=4)
INPUTS = st.dictionaries(st.text(max_size=3), st.text(max_size=9) | st.integers(), max_size=3)


@st.composite
def streams(draw: st.DrawFn) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """An answer, whole and in the chunks that an engine may have cut it into."""
    thinking, text = draw(PIECES), draw(PIECES)
    inputs = draw(st.lists(INPUTS, max_size=3))
    name = draw(st.sampled_from(["reasoning_content", "reasoning"]))
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{name: piece, "content": None} for piece in thinking]
    deltas += [{"content": piece} for piece in text]
    calls = []
    for number, given_input in enumerate(inputs):
        arguments = json.dumps(given_input)
        function = {"name": "ls", "arguments": arguments}
        calls.append({"id": f"c{number}", "type": "function", "function": function})
        cut = draw(st.integers(0, len(arguments)))
        # Some servers repeat id and name, some give every call the index 0.
        index = draw(st.sampled_from([number, 0]))
        again = {"id": f"c{number}", "name": "ls"} if index != number else {}
        opening = {"name": "ls", "arguments": arguments[:cut]}
        deltas.append(call_part(index, id=f"c{number}", **opening))
        deltas.append(call_part(index, **again, arguments=arguments[cut:]))
    finish = "tool_calls" if calls else draw(st.sampled_from(["stop", "length"]))
    chunks = [chunk(delta) for delta in deltas]
    if draw(st.booleans()):
        chunks[-1]["choices"][0]["finish_reason"] = finish
    else:
        chunks.append(chunk({}, finish))
    chunks.append({"choices": [], "usage": USAGE})
    said = {"content": "".join(text), name: "".join(thinking), "tool_calls": calls}
    return answer(finish, **said), chunks


@given(streams())
def test_a_stream_says_what_the_whole_answer_says(
    case: tuple[dict[str, Any], list[dict[str, Any]]],
) -> None:
    """The SDK puts the events together to the same message."""
    document, chunks = case
    assert read(events_of(chunks)) == whole(document)


def test_usage_and_account_come_with_the_last_delta() -> None:
    """They do so wherever in the stream the engine reported them."""
    applied = {"applied_edits": []}
    account = {"tokens": {"prompt": 10, "prefix": 5, "spliced": 0}}
    finish = chunk({}, "stop", leyline=account, context_management=applied)
    usage = {"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": 4}}
    last = events_of([chunk({"content": "a"}), finish, usage])[-2]
    assert last["type"] == "message_delta"
    assert (last["leyline"], last["context_management"]) == (account, applied)
    assert (last["usage"]["input_tokens"], last["usage"]["output_tokens"]) == (5, 4)


def test_blocks_alternate_as_the_engine_does() -> None:
    """Text after a call, or thinking after text, opens a new block."""
    chunks = [
        chunk({"content": "a"}),
        chunk({"reasoning_content": "hm"}),
        chunk(call_part(0, id="c0", name="ls", arguments="{}")),
        chunk({"content": "b"}),
        chunk({}, "stop"),
    ]
    kinds = [block.type for block in read(events_of(chunks)).content]
    assert kinds == ["text", "thinking", "tool_use", "text"]


def test_other_choices_are_left_out() -> None:
    """A message has one answer."""
    other = chunk({"content": "other"}, "stop")
    other["choices"][0]["index"] = 1
    message = read(events_of([chunk({"content": "a"}), other, chunk({}, "stop")]))
    assert [block.text for block in message.content if block.type == "text"] == ["a"]


def test_a_name_may_come_behind_its_arguments() -> None:
    """A block isn't opened before it can be named, and loses nothing."""
    chunks = [
        chunk(call_part(0, id="c0", arguments='{"a"')),
        chunk(call_part(0, name="ls", arguments=": 1}")),
        chunk({}, "tool_calls"),
    ]
    (use,) = read(events_of(chunks)).content
    assert use.type == "tool_use"
    assert (use.id, use.input) == ("c0", {"a": 1})


FIRST, SECOND = (chunk(call_part(i, id=f"c{i}", name="ls", arguments="{}")) for i in (0, 1))
NAMELESS = chunk(call_part(0, id="c0", arguments="{}"))


@pytest.mark.parametrize(
    "chunks",
    [
        [FIRST, SECOND, chunk(call_part(0, arguments="{}")), chunk({}, "tool_calls")],
        [NAMELESS, chunk({}, "tool_calls")],
        [NAMELESS, chunk({"content": "a"})],
        [chunk({"content": "a"})],
    ],
    ids=["after its end", "nameless", "nameless before text", "torn"],
)
def test_what_cannot_be_told_is_an_error(chunks: list[dict[str, Any]]) -> None:
    """No call gets another's arguments, and no torn answer passes for a whole one."""
    with pytest.raises(AnswerError):
        events_of(chunks)


def test_a_message_ends_once() -> None:
    """It ends once, however often the engine says so."""
    events = MessageEvents(message_id="msg_1", model="m", stop_sequences=())
    list(events.feed(chunk({"content": "a"}, "stop")))
    assert [event["type"] for event in events.close()][-1] == "message_stop"
    assert list(events.close()) == []
