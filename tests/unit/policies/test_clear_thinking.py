"""clear_thinking, case by case."""

from __future__ import annotations

from typing import Any

import pytest
from tool_talks import USER, asks, call, result, sent

from leyline_policies import Message, SpecError, load_pipeline
from leyline_policies.builtin.clear_thinking import ClearThinking, without_think_tags


def _thinks(thought: str, text: Any = "so", **more: Any) -> Message:
    return {"role": "assistant", "content": text, "reasoning_content": thought, **more}


def _thoughts(messages: list[Message]) -> list[Any]:
    return [m.get("reasoning_content") for m in messages if m["role"] == "assistant"]


def test_newest_thinking_turn_stays() -> None:
    """By default the last turn that holds thinking keeps it, and none before."""
    messages = [USER, _thinks("a"), USER, _thinks("b"), USER, {"role": "assistant", "content": "x"}]
    after = sent(ClearThinking(), messages)
    assert _thoughts(after) == [None, "b", None]
    assert after[1] == {"role": "assistant", "content": "so"}


def test_a_turn_is_all_between_two_messages_of_the_user() -> None:
    """Thinking on both sides of a tool call is of one turn; counted by message it is not."""
    first = {**asks(call("1")), "reasoning_content": "a"}
    messages = [USER, _thinks("old"), USER, first, result("1", "out"), _thinks("b")]
    assert _thoughts(sent(ClearThinking(), messages)) == [None, "a", "b"]
    assert _thoughts(sent(ClearThinking(unit="message"), messages)) == [None, None, "b"]
    assert sent(ClearThinking(keep="0"), messages)[3]["tool_calls"] == first["tool_calls"]


def test_all_thinking_stays_when_asked_to() -> None:
    """``keep="all"`` edits nothing, ``keep=0`` leaves nothing."""
    messages = [USER, _thinks("a"), USER, _thinks("b")]
    assert sent(ClearThinking(keep="all"), messages) is not None
    assert _thoughts(sent(ClearThinking(keep="all"), messages)) == ["a", "b"]
    assert _thoughts(sent(ClearThinking(keep="0"), messages)) == [None, None]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"reasoning": "x", "content": "a"}, {"content": "a"}),
        ({"reasoning_details": [{"text": "x"}], "content": "a"}, {"content": "a"}),
        ({"thinking_blocks": [{"thinking": "x"}], "content": None}, {"content": None}),
        (
            {"content": [{"type": "thinking", "thinking": "x"}, {"type": "text", "text": "a"}]},
            {"content": [{"type": "text", "text": "a"}]},
        ),
        ({"content": [{"type": "redacted_thinking", "data": "x"}]}, {"content": ""}),
    ],
)
def test_every_form_of_thinking_goes(message: Message, expected: Message) -> None:
    """Members and content parts that servers use for thinking are removed; the rest stays."""
    (after,) = sent(ClearThinking(keep="0"), [{"role": "assistant", **message}])
    assert after == {"role": "assistant", **expected}


def test_only_the_assistant_thinks() -> None:
    """The same members of other roles are left alone, and so are empty ones."""
    messages: list[Message] = [
        {"role": "user", "content": "<think>x</think>", "reasoning": "x"},
        {"role": "assistant", "content": "a", "reasoning_content": ""},
    ]
    assert sent(ClearThinking(keep="0", think_tags=True), messages) == messages


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a</think>\n\nb", "b"),
        ("a<think>b</think>c<think>d</think>\ne", "ace"),
        ("opened by the template</think>b", "b"),
        ("never closed <think>b", "never closed <think>b"),
        ("a</think>b<think>c</think>d<think>e", "bd<think>e"),
    ],
)
def test_tags_in_the_text_go_where_wanted(text: str, expected: str) -> None:
    """``<think>…</think>`` counts as thinking only with ``think_tags``."""
    assert without_think_tags(text) == expected
    messages: list[Message] = [{"role": "assistant", "content": text}]
    assert sent(ClearThinking(keep="0", think_tags=True), messages)[0]["content"] == expected
    assert sent(ClearThinking(keep="0"), messages)[0]["content"] == text


def test_unclosed_tags_take_linear_time() -> None:
    """A text of nothing but opening tags is passed over once."""
    assert without_think_tags("<think>" * 200_000 + "</think>x") == "x"
    hostile = "<think>a</think>" + "<think>" * 200_000
    assert without_think_tags(hostile) == "<think>" * 200_000


@pytest.mark.parametrize("keep", ["-1", "some", "", "1.5"])
def test_keep_is_a_number_or_all(keep: str) -> None:
    """Anything else is refused when the policy is built."""
    with pytest.raises(SpecError, match="keep="):
        load_pipeline(f'clear_thinking:keep="{keep}"')
