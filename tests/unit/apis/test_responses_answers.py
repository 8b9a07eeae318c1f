"""Answers of engines as responses, and back as input of the next turn."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response
from support.responses_talks import (
    KEY,
    answers,
    called,
    chat,
    chunked,
    completion,
    gave,
    opening,
    said,
    streamed,
    whole,
)

from leyline_proxy.apis.chat_answers import AnswerError
from leyline_proxy.apis.responses.answer import map_answer, map_usage, shown_request
from leyline_proxy.model.messages import check_messages


@given(answers(), st.booleans())
def test_an_answer_that_comes_back_is_the_message_it_was(
    message: dict[str, Any], carries: bool
) -> None:
    """Its items are one chat message again, the engine's own, character for character."""
    items = whole(message, carries=carries)["output"]
    before = said("Go.")
    assert chat([before, *items])[1:] == [message]
    assert check_messages(chat([before, *items]))


@given(st.data(), answers())
def test_a_stream_ends_with_the_response_of_the_whole_answer(
    data: st.DataObject, message: dict[str, Any]
) -> None:
    """It does so however it was cut."""
    _, response = streamed(data.draw(chunked(message)))
    expected = whole(message)
    assert response["output"] == expected["output"]
    assert response["status"] == expected["status"] == "completed"


@given(answers(), answers())
def test_answers_without_anything_between_stay_two_messages(
    first: dict[str, Any], second: dict[str, Any]
) -> None:
    """Their items' ids say which response each belongs to."""
    items = [*whole(first)["output"], *whole(second, key=KEY[::-1])["output"]]
    assert chat([said("Go."), *items])[1:] == [first, second]


@given(answers())
def test_a_client_that_sends_only_encrypted_reasoning_loses_none(message: dict[str, Any]) -> None:
    """Some keep of a reasoning item nothing else."""
    items = whole(message, carries=True)["output"]
    bare = [
        {key: value for key, value in item.items() if key not in ("content", "status")}
        if item["type"] == "reasoning"
        else item
        for item in items
    ]
    assert chat([said("Go."), *bare])[1:] == [message]


def test_a_response_is_what_the_sdk_takes() -> None:
    """Every item and every member, checked against the SDK's own types."""
    calls = [
        {"id": "c1", "function": {"name": "crm__find", "arguments": "{}"}},
        {"id": "c2", "function": {"name": "patch", "arguments": '{"input": "*** a"}'}},
        {"id": "c3", "function": {"name": "local_shell", "arguments": '{"command": ["ls"]}'}},
    ]
    message = {"content": "I look.", "reasoning_content": "Hm.", "tool_calls": calls}
    document = {**whole(message, "tool_calls"), "usage": map_usage(None, None)}
    response = Response.model_validate(document, strict=True)
    reasoning, text, find, patch, shell = response.output
    assert (reasoning.type, text.type, find.type) == ("reasoning", "message", "function_call")
    assert (find.name, find.namespace, find.call_id) == ("find", "crm", "c1")
    assert patch.type == "custom_tool_call"
    assert (patch.name, patch.input) == ("patch", "*** a")
    assert shell.type == "local_shell_call"
    assert shell.action.command == ["ls"]
    assert response.output_text == "I look."
    assert response.status == "completed"


@given(
    st.dictionaries(
        st.sampled_from(
            [
                "temperature",
                "top_p",
                "user",
                "metadata",
                "parallel_tool_calls",
                "prompt_cache_key",
                "safety_identifier",
                "top_logprobs",
                "max_tool_calls",
                "reasoning",
                "text",
            ]
        ),
        st.none() | st.booleans() | st.just([]) | st.just({}) | st.just("x") | st.floats(0, 1),
    )
)
def test_what_a_response_repeats_has_the_apis_types(asked: dict[str, Any]) -> None:
    """An engine may overlook a member of another type; the client's types don't."""
    document = {**whole({"content": "Hi."}), "usage": None, **shown_request(asked, store=False)}
    Response.model_validate(document)


@pytest.mark.parametrize(
    ("finish", "status", "reason"),
    [
        ("stop", "completed", None),
        ("tool_calls", "completed", None),
        ("length", "incomplete", "max_output_tokens"),
        ("content_filter", "incomplete", "content_filter"),
    ],
)
def test_why_it_ended(finish: str, status: str, reason: str | None) -> None:
    """An answer that was cut off is incomplete, and so is its last item."""
    response = whole({"content": "a"}, finish)
    assert response["status"] == response["output"][-1]["status"] == status
    assert response["incomplete_details"] == ({"reason": reason} if reason else None)


def test_a_refusal_is_a_part_of_its_own() -> None:
    """It comes back as the assistant's words."""
    (item,) = whole({"content": None, "refusal": "No."})["output"]
    assert item["content"] == [{"type": "refusal", "refusal": "No."}]
    assert chat([said("Go."), item])[1] == {"role": "assistant", "content": "No."}


def test_arguments_in_another_form_than_asked_for_are_passed_on() -> None:
    """Models don't always obey: a custom tool gets the text, a shell's call is a function's."""
    calls = [
        {"id": "c1", "function": {"name": "patch", "arguments": "*** Begin"}},
        {"id": "c2", "function": {"name": "local_shell", "arguments": '{"command": "ls"}'}},
    ]
    patch, shell = whole({"content": None, "tool_calls": calls})["output"]
    assert patch["input"] == "*** Begin"
    assert (shell["type"], shell["arguments"]) == ("function_call", '{"command": "ls"}')


def test_usage_says_what_was_cached() -> None:
    """The cached tokens are by the engine's own count, or else by the receipt."""
    usage = {"prompt_tokens": 10, "completion_tokens": 4}
    told = {"prompt_tokens_details": {"cached_tokens": 6}}
    thought = {"completion_tokens_details": {"reasoning_tokens": 3}}
    account = {"tokens": {"prompt": 10, "prefix": 2, "spliced": 5}}
    assert map_usage({**usage, **told, **thought}, account) == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 6, "cache_write_tokens": 0},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 3},
        "total_tokens": 14,
    }
    assert map_usage(usage, account)["input_tokens_details"]["cached_tokens"] == 7
    assert map_usage(None, None)["total_tokens"] == 0


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"choices": "none"},
        {"choices": [{"index": 0, "message": None}]},
        completion({"tool_calls": [{"id": "c1", "function": {}}]}),
        completion({"tool_calls": ["x"]}),
    ],
)
def test_what_is_no_answer_is_refused(answer: dict[str, Any]) -> None:
    """Rather than shown as an empty one."""
    with pytest.raises(AnswerError):
        map_answer(answer, opening())


def test_parallel_calls_are_one_message() -> None:
    """Their outputs follow it, each as a message of its own."""
    talk = [said("Go."), called(call_id="c1"), called(call_id="c2"), gave("1"), gave("2", "c2")]
    roles = [message["role"] for message in chat(talk)]
    assert roles == ["user", "assistant", "tool", "tool"]
    assert [call["id"] for call in chat(talk)[1]["tool_calls"]] == ["c1", "c2"]
