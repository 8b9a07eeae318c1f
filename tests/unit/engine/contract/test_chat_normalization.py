"""Messages in the form that chat templates expect, and which templates take lists of parts."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_engine.contract import normalize_messages, template_takes_parts
from leyline_replay.models.tiny_chat_template import CHAT_TEMPLATE

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
TEXT_PARTS = st.builds(lambda text: {"type": "text", "text": text}, st.text(max_size=5))
OTHER_PARTS = st.sampled_from(
    [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": None}, 7, None]
)
CONTENTS = st.none() | st.text(max_size=5) | st.lists(TEXT_PARTS | OTHER_PARTS, max_size=3)
ARGUMENTS = st.text(max_size=8) | JSON.map(json.dumps) | JSON
CALLS = st.builds(
    lambda arguments: {"id": "1", "function": {"name": "f", "arguments": arguments}}, ARGUMENTS
)
CALL_LISTS = st.lists(CALLS | st.sampled_from([None, 3, {}, {"function": None}]), max_size=2)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool"])},
        optional={
            "content": CONTENTS,
            "tool_calls": st.none() | CALL_LISTS,
            "reasoning_content": st.text(max_size=3),
        },
    ),
    max_size=4,
)
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


def part(text: str) -> dict[str, Any]:
    """A text part."""
    return {"type": "text", "text": text}


def called(arguments: Any) -> dict[str, Any]:
    """An assistant's message with one tool call."""
    function = {"name": "f", "arguments": arguments, "strict": True}
    call = {"id": "c", "type": "function", "function": function, "index": 0}
    return {"role": "assistant", "content": "x", "tool_calls": [call]}


def arguments_after(arguments: Any) -> Any:
    """The tool call's arguments after normalization."""
    (message,) = normalize_messages([called(arguments)], parts=False)
    return message["tool_calls"][0]["function"]["arguments"]


@given(MESSAGES, st.booleans())
def test_normalising_changes_only_what_it_must(messages: list[Any], parts: bool) -> None:
    """Inputs stay, other keys survive, nothing fails, and a second time changes nothing at all."""
    before = copy.deepcopy(messages)
    normal = normalize_messages(messages, parts=parts)
    assert messages == before
    assert len(normal) == len(messages)
    for old, new in zip(messages, normal, strict=True):
        assert new["content"] is not None
        assert parts or isinstance(new["content"], str)
        gone = set() if old.get("tool_calls") else {"tool_calls"}
        assert new.keys() == (old.keys() | {"content"}) - gone
        kept = old.keys() - {"content", "tool_calls"}
        assert {key: new[key] for key in kept} == {key: old[key] for key in kept}
    again = normalize_messages(normal, parts=parts)
    assert all(new is old for new, old in zip(again, normal, strict=True))


@given(st.dictionaries(st.text(max_size=4), JSON), st.sampled_from([None, 2]))
def test_arguments_that_are_an_objects_text_become_the_object(value: Any, indent: Any) -> None:
    """They do in any layout of the text; the call's other members stay."""
    original = called(json.dumps(value, indent=indent))
    (message,) = normalize_messages([original], parts=True)
    expected = called(value)
    assert message == expected


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "no json",
        "[1]",
        '"{}"',
        "3",
        "null",
        '{"a": 1',
        '{"a": 1} x',
        '{"a": "\\ud800"}',
        '{"a": ' * 50_000,
        '{"a": ' + "9" * 5_000 + "}",
        None,
        4,
        ["a"],
    ],
    ids=lambda value: str(value)[:12],
)
def test_other_arguments_stay(arguments: Any) -> None:
    """So does text whose object couldn't be written to a prompt; the message is the same object."""
    message = called(arguments)
    assert normalize_messages([message], parts=False)[0] is message
    assert arguments_after(arguments) == arguments


def test_escaped_characters_are_read() -> None:
    """A whole surrogate pair is a character like any other."""
    assert arguments_after('{"a": "\\ud83d\\udc4b \\u00fc"}') == {"a": "👋 ü"}


def test_only_assistants_calls_are_opened() -> None:
    """Elsewhere ``tool_calls`` means nothing."""
    message = {**called("{}"), "role": "user"}
    assert normalize_messages([message], parts=False)[0] is message


@pytest.mark.parametrize("calls", [None, []])
def test_no_calls_are_left_out(calls: Any) -> None:
    """Templates that ask for the member find none."""
    message = {"role": "assistant", "content": "x", "tool_calls": calls}
    expected = {"role": "assistant", "content": "x"}
    assert normalize_messages([message], parts=False) == [expected]


@pytest.mark.parametrize("content", [{}, {"content": None}])
def test_no_content_is_empty_text(content: dict[str, Any]) -> None:
    """This holds for null and for missing content."""
    message = {"role": "assistant", **content, "refusal": None}
    expected = {"role": "assistant", "content": "", "refusal": None}
    assert normalize_messages([message], parts=True) == [expected]


@pytest.mark.parametrize(
    ("role", "content", "with_parts", "without"),
    [
        ("user", [part("a"), part("b\n")], None, "ab\n"),
        ("user", [part("a"), IMAGE, part("b")], None, "ab"),
        ("user", [IMAGE], None, ""),
        ("user", ["a", part("b")], None, "ab"),
        ("user", [], None, ""),
        ("tool", [part("a"), part("b")], "ab", "ab"),
        ("tool", [part("a"), IMAGE], None, "a"),
    ],
)
def test_lists_of_parts(role: str, content: Any, with_parts: str | None, without: str) -> None:
    """Texts are joined, unless the template loops over parts; a tool's texts always are."""
    message = {"role": role, "content": content, "name": "n"}
    (kept,) = normalize_messages([message], parts=True)
    assert kept == {**message, "content": content if with_parts is None else with_parts}
    assert (kept is message) == (with_parts is None)
    assert normalize_messages([message], parts=False) == [{**message, "content": without}]


@pytest.mark.parametrize(
    "source",
    [
        "{% for part in message.content %}{{ part.text }}{% endfor %}",
        "{%- for part in message['content'] -%}{%- endfor -%}",
        '{%+ for part in m["content"][1:] %}{% endfor %}',
        "{% for i, part in messages[0].content | selectattr('type') %}{% endfor %}",
        "{% for part in messages[0]['content'] if part.type == 'text' %}{% endfor %}",
        "{% for part in (message.content or []) %}{% endfor %}",
        "{% for part in msg.get('content', []) %}{% endfor %}",
        "{% set c = msg.get('content') %}{% for part in c %}{% endfor %}",
        "{% set c = m.content if m.content else [] %}{% set d = c %}{% for x in d %}{% endfor %}",
        "{% macro f(content) %}{% for part in\n content\n%}{% endfor %}{% endmacro %}",
        CHAT_TEMPLATE,
    ],
)
def test_a_template_that_loops_over_contents_takes_parts(source: str) -> None:
    """It takes them however it reaches the content."""
    assert template_takes_parts(source)


@pytest.mark.parametrize(
    "source",
    [
        "",
        "{% for message in messages %}{{ message.content }}{% endfor %}",
        "{# for #}{# {% for part in message.content %} #}{{ message.content }}",
        "{{ 'for part in message.content' }}",
        "{% for part in message.content.split('a') %}{% endfor %}",
        "{% for part in message.contents %}{% endfor %}",
        "{% for content in message.tool_calls %}{{ content }}{% endfor %}",
        "{% set content = m.content %}{% for line in content.split('a') %}{% endfor %}",
        "{% if message.content is iterable %}{{ message.content | tojson }}{% endif %}",
        "{% for unclosed",
    ],
)
def test_other_templates_take_text(source: str) -> None:
    """A content that is only printed, tested or split is no list."""
    assert not template_takes_parts(source)
