"""Answers of an engine, whole and in chunks, and their mapping to the Responses API and back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from leyline_proxy.apis.responses.answer import Opening, map_answer, shown_request
from leyline_proxy.apis.responses.request import ChatMapping, input_items, map_request
from leyline_proxy.apis.responses.stream import ResponseEvents

KEY = "0123456789abcdef" * 2
Talk = list[dict[str, Any]]
TOOLS: Talk = [
    {"type": "function", "name": "ls", "parameters": {"type": "object"}, "strict": False},
    {"type": "custom", "name": "patch", "format": {"type": "text"}},
    {
        "type": "namespace",
        "name": "crm",
        "description": "Customers.",
        "tools": [{"type": "function", "name": "find", "parameters": {"type": "object"}}],
    },
    {"type": "local_shell"},
    {"type": "web_search", "external_web_access": True},
]


def mapped(**members: Any) -> ChatMapping:
    """A request's mapping."""
    body = {"model": "m", "input": "Hello.", **members}
    return map_request(body, input_items(body))


def chat(items: Any, **members: Any) -> Talk:
    """The chat messages of input items."""
    found: Talk = mapped(input=items, **members).body["messages"]
    return found


def said(text: str, role: str = "user") -> dict[str, Any]:
    """A message."""
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def called(name: str = "ls", call_id: str = "c1", **members: Any) -> dict[str, Any]:
    """A function's call."""
    head = {"type": "function_call", "call_id": call_id, "name": name}
    return {**head, "arguments": '{"path": "a"}', **members}


def gave(output: Any, call_id: str = "c1", kind: str = "function_call") -> dict[str, Any]:
    """The output item of a call."""
    return {"type": f"{kind}_output", "call_id": call_id, "output": output}


def opening(*, carries: bool = False, key: str = KEY, **members: Any) -> Opening:
    """The facts known before an answer."""
    mapping = mapped(tools=TOOLS)
    shown = shown_request({"tools": TOOLS, **members}, store=True)
    return Opening(
        key=key,
        created_at=1,
        model="m",
        shown=shown,
        tools=mapping.tools,
        carries_reasoning=carries,
    )


def completion(message: dict[str, Any], finish: str = "stop") -> dict[str, Any]:
    """A chat completion."""
    choice = {"index": 0, "message": message, "finish_reason": finish}
    return {"model": "m", "choices": [choice]}


def whole(message: dict[str, Any], finish: str = "stop", **options: Any) -> dict[str, Any]:
    """The response of an answer."""
    return map_answer(completion(message, finish), opening(**options))


def piece(delta: dict[str, Any], finish: str | None = None, **members: Any) -> dict[str, Any]:
    """A chunk."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {"model": "m", "choices": [choice], **members}


def streamed(chunks: Sequence[dict[str, Any]], **options: Any) -> tuple[Talk, dict[str, Any]]:
    """The events of chunks, and the response that they end with."""
    events = ResponseEvents(opening(**options))
    found = [event for one in chunks for event in events.feed(one)]
    found += events.close()
    assert events.response is not None
    return found, events.response


TEXT = st.text(alphabet='ab \n{}"\\é€😀', max_size=8)
_FUNCTION = st.builds(json.dumps, st.dictionaries(TEXT, TEXT, max_size=2))
_CUSTOM = st.builds(lambda text: json.dumps({"input": text}, ensure_ascii=False), TEXT)
_SHELL = st.builds(
    lambda words: json.dumps({"command": words}, ensure_ascii=False),
    st.lists(TEXT, min_size=1, max_size=2),
)
_CALL = st.one_of(
    st.tuples(st.sampled_from(["ls", "crm__find", "nobody_knows"]), _FUNCTION),
    st.tuples(st.just("patch"), _CUSTOM),
    st.tuples(st.just("local_shell"), _SHELL),
)


@st.composite
def answers(draw: st.DrawFn, *, breaks_off: bool = False) -> dict[str, Any]:
    """An assistant's message as chat engines give it.

    Args:
        breaks_off: True if arguments may be no JSON object.
    """
    kinds = _CALL | st.tuples(st.just("ls"), TEXT) if breaks_off else _CALL
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(draw(st.lists(kinds, max_size=3)))
    ]
    text, thinking = draw(TEXT), draw(TEXT)
    message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else "")}
    if thinking:
        message["reasoning_content"] = thinking
    if calls:
        message["tool_calls"] = calls
    return message


@st.composite
def chunked(draw: st.DrawFn, message: dict[str, Any]) -> Talk:
    """``message`` in chunks, cut anywhere."""
    chunks = [piece({"role": "assistant", "content": ""})]
    for name in ("reasoning_content", "content"):
        chunks += [piece({name: part}) for part in draw(cuts(message.get(name) or ""))]
    for index, call in enumerate(message.get("tool_calls", ())):
        function = call["function"]
        head = {"index": index, "id": call["id"], "type": "function"}
        named = {"name": function["name"], "arguments": ""}
        chunks.append(piece({"tool_calls": [{**head, "function": named}]}))
        for part in draw(cuts(function["arguments"])):
            more = {"index": index, "function": {"arguments": part}}
            chunks.append(piece({"tool_calls": [more]}))
    return [*chunks, piece({}, "tool_calls" if "tool_calls" in message else "stop")]


def cuts(text: str) -> st.SearchStrategy[list[str]]:
    """``text`` in one or two parts; none of an empty one."""
    if not text:
        return st.just([])
    return st.integers(0, len(text)).map(
        lambda at: [part for part in (text[:at], text[at:]) if part]
    )


NAMES = [
    "input",
    "instructions",
    "tools",
    "tool_choice",
    "max_output_tokens",
    "text",
    "reasoning",
    "previous_response_id",
    "truncation",
    "include",
    "context_management",
    "type",
    "role",
    "content",
    "id",
    "call_id",
    "output",
    "arguments",
    "action",
    "command",
    "name",
    "format",
    "namespace",
    "parameters",
    "summary",
]
_WORDS = [
    "message",
    "user",
    "assistant",
    "developer",
    "reasoning",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "local_shell_call",
    "local_shell_call_output",
    "item_reference",
    "additional_tools",
    "input_text",
    "output_text",
    "input_image",
    "input_file",
    "refusal",
    "function",
    "custom",
    "namespace",
    "local_shell",
    "allowed_tools",
    "web_search",
    "grammar",
    "json_schema",
    "auto",
]
_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(_WORDS) | TEXT,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=5)
    ),
    max_leaves=12,
)
_TYPED = st.fixed_dictionaries(
    {"type": st.sampled_from(_WORDS)},
    optional={name: st.sampled_from(_WORDS) | _ANYTHING for name in NAMES[12:]},
)
_GOOD = st.fixed_dictionaries(
    {"input": st.just("Hello.") | st.lists(st.builds(said, TEXT), min_size=1, max_size=2)},
    optional={
        "instructions": TEXT,
        "tools": st.lists(st.sampled_from(TOOLS), max_size=2, unique_by=str),
        "tool_choice": st.sampled_from(["auto", "none"]),
        "truncation": st.just("auto"),
        "reasoning": st.just({"effort": "high"}),
    },
)
_ODD = st.dictionaries(
    st.sampled_from(NAMES[:11]), st.lists(_TYPED, max_size=3) | _ANYTHING, max_size=2
)
BODIES = st.builds(lambda good, odd: {**good, **odd}, _GOOD, _ODD)
"""Requests that are right, but for the values of some members."""
