"""The proxy's account of what SGLang does to messages and tools, against SGLang's own code."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.serving_chat import (
    normalize_assistant_tool_call_arguments,
    normalize_tool_content,
)
from sglang.srt.function_call.utils import normalize_json_schema_types
from sglang.srt.parser.jinja_template_utils import process_content_for_template_format

from leyline_proxy.render.dialects import RenderError, SglangDialect

Json = dict[str, Any]

texts = st.sampled_from(["", "One.", " two\n", "Grüß 👋"])
parts = st.one_of(
    st.fixed_dictionaries(
        {"type": st.just("text"), "text": texts}, optional={"cache_control": st.none()}
    ),
    st.fixed_dictionaries({"type": st.just("thinking"), "thinking": texts}),
    st.just({"type": "image_url", "image_url": {"url": "http://localhost/a.png"}}),
)
contents = st.one_of(st.none(), texts, st.lists(parts, max_size=3))
arguments = st.sampled_from(['{"a": [1, 2.0, null]}', "{}", "[]", "no", "", None, {"b": None}])
functions = st.fixed_dictionaries(
    {}, optional={"arguments": arguments, "name": st.sampled_from(["f", None]), "x": st.just(1)}
)
calls = st.fixed_dictionaries(
    {"function": functions},
    optional={
        "id": st.sampled_from(["c", None]),
        "index": st.sampled_from([0, None]),
        "type": st.sampled_from(["function", "custom"]),
    },
)
schemas = st.sampled_from(
    [
        {},
        None,
        {"type": "object", "properties": {"a": {"type": "string", "default": None}}},
        {"type": "object", "properties": {"type": {"type": ["string", "null"]}}},
        {"type": "object", "properties": {"a": {"type": "varchar(9)"}}},
        {"anyOf": [{"type": "INT"}]},
    ]
)
tools = st.fixed_dictionaries(
    {
        "function": st.fixed_dictionaries(
            {"name": st.just("f")},
            optional={
                "parameters": schemas,
                "description": st.sampled_from(["d", None]),
                "strict": st.sampled_from([True, False, None]),
                "defer_loading": st.sampled_from([True, None]),
                "x": st.just(1),
            },
        )
    },
    optional={"type": st.just("function"), "defer_loading": st.sampled_from([False, None])},
)
messages = st.fixed_dictionaries(
    {
        "role": st.sampled_from(
            ["system", "user", "User", "assistant", "Assistant", "tool", "function", "other"]
        )
    },
    optional={
        "content": contents,
        "name": st.sampled_from(["n", None]),
        "tool_call_id": st.just("c"),
        "reasoning_content": st.sampled_from(["why", "", None]),
        "tool_calls": st.one_of(st.none(), st.lists(calls, max_size=2)),
        "tools": st.one_of(st.none(), st.lists(tools, max_size=1)),
        "phase": st.sampled_from(["final_answer", "other", None]),
        "prefix": st.sampled_from([True, None]),
    },
)


def as_sglang(message: Json, content_format: str) -> Json | None:
    """Return a template's view of a message, by the steps of ``_apply_jinja_template``; None if the
    request is refused."""
    try:
        (record,) = ChatCompletionRequest.model_validate({"messages": [message]}).messages
        shown = record.model_dump()
        normalize_assistant_tool_call_arguments(shown)
    except (ValidationError, ValueError):
        return None
    if shown.get("content") is None:
        shown["content"] = ""
    media: list[Any] = []
    shown = process_content_for_template_format(shown, content_format, media, media, media, media)
    shown["content"] = normalize_tool_content(shown["role"], shown.get("content"))
    return None if media else shown


def copied(value: Any) -> Any:
    """The value as it comes from JSON."""
    return json.loads(json.dumps(value))


def in_order(value: Any) -> str:
    """The value with the order of its members."""
    return json.dumps(value)


@pytest.mark.parametrize("takes_parts", [False, True])
@given(message=messages)
def test_a_message_is_shown_as_sglang_shows_it(takes_parts: bool, message: Json) -> None:
    """Equal in members and their order; what SGLang refuses is refused."""
    theirs = as_sglang(copied(message), "openai" if takes_parts else "string")
    try:
        ours = SglangDialect(takes_parts).message(copied(message))
    except RenderError:
        return  # the engine is asked then
    assert theirs is not None
    assert in_order(ours) == in_order(theirs)


@given(given_tools=st.lists(tools, max_size=3))
def test_tools_are_shown_as_sglang_shows_them(given_tools: list[Json]) -> None:
    """Equal in members and their order; schemas that SGLang rewrites are left to it."""
    body = {"messages": [{"role": "user", "content": ""}], "tools": copied(given_tools)}
    request = ChatCompletionRequest.model_validate(body)
    for tool in request.tools or []:
        normalize_json_schema_types(tool.function.parameters)
    theirs = [tool.model_dump() for tool in request.tools or []]
    try:
        ours = SglangDialect(False).asked({"tools": copied(given_tools)}).tools or []
    except RenderError:
        assert any(word in in_order(given_tools) for word in ("varchar", "INT"))
        return
    assert in_order(ours) == in_order(theirs)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "x", "name": "ada"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ],
)
def test_ordinary_messages_are_not_left_to_the_engine(message: Json) -> None:
    """Messages that agents send every day are shown here."""
    shown = SglangDialect(False).message(message)
    assert shown == as_sglang(copied(message), "string")
