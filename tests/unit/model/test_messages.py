"""Messages, options, identity: what a request says and which conversation it belongs to."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_proxy.model.fields import OptionError
from leyline_proxy.model.history import history_chain, session_key
from leyline_proxy.model.messages import (
    MAX_DEPTH,
    Message,
    MessageError,
    check_messages,
    fingerprint,
)
from leyline_proxy.model.undeclared import UndeclaredRules
from leyline_proxy.request.options import parse_options

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@given(st.text(), st.sampled_from(["user", "system", "assistant"]))
def test_markers_order_and_shape_leave_the_fingerprint(text: str, role: str) -> None:
    """Cache markers, key order, nulls and a single text part don't make another message."""
    plain = {"role": role, "content": text}
    part = {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
    assert fingerprint(plain) == fingerprint({"name": None, "content": [part], "role": role})
    assert fingerprint(plain) != fingerprint({"role": role, "content": text + "."})


def test_arguments_are_compared_as_they_are() -> None:
    """A tool argument that happens to be called like a marker is data, and a template shows
    arguments in their order."""
    given = ({"cache_control": 1}, {}, {"a": {"x": 1, "y": 2}}, {"a": {"y": 2, "x": 1}}, "{}")
    calls = [[{"function": {"arguments": arguments}}] for arguments in given]
    prints = {fingerprint({"role": "assistant", "tool_calls": each}) for each in calls}
    assert len(prints) == len(given)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ("x", "messages"),
        ([], "messages"),
        (["x"], "messages[0]"),
        ([{"role": "wizard", "content": ""}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": [{"text": "a"}]}], "messages[0].content[0]"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a", "leyline": {}}]}],
            "messages[0].content[0].leyline",
        ),
        (
            [{"role": "assistant", "tool_calls": [{**CALL, "leyline": {"forget": True}}]}],
            "messages[0].tool_calls[0].leyline",
        ),
        ([{"role": "tool", "content": "r", "tool_call_id": 1}], "messages[0].tool_call_id"),
        ([{"role": "tool", "content": 3, "tool_call_id": "c"}], "messages[0].content"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].id"),
    ],
)
def test_bad_messages_name_the_field(messages: Any, param: str) -> None:
    """The error says which field is wrong."""
    with pytest.raises(MessageError) as caught:
        check_messages(messages)
    assert caught.value.param == param


def test_unusual_messages_are_tolerated() -> None:
    """Unknown members, other part types, content that is null beside tool calls or in a result, and
    results whose call isn't there pass, as at engines."""
    messages = [
        {"role": "developer", "content": "d", "x": 1},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None},
        {"role": "tool", "content": None, "tool_call_id": "c1"},
        {"role": "tool", "content": "r", "tool_call_id": "gone"},
        {"role": "tool"},
    ]
    assert check_messages(messages) == messages


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        ([], "leyline"),
        ({"polcy": "x"}, "leyline"),
        ({"policy": 3}, "leyline.policy"),
        ({"boundary": -1}, "leyline.boundary"),
        ({"undeclared": {"wizard": "exact"}}, "leyline.undeclared"),
        ({"undeclared": {"tool": "forget"}}, "leyline.undeclared.tool"),
        ({"edits": [{"message": "x"}]}, "leyline.edits[0].message"),
        ({"edits": [{"message": -1}]}, "leyline.edits[0].message"),
        ({"edits": [{"message": 0, "chars": [4, 2], "replacement": ""}]}, "leyline.edits[0].chars"),
        ({"edits": [{"message": 0, "chars": [0, 2]}]}, "leyline.edits[0].replacement"),
        ({"edits": [{"message": 0, "drop": True, "replacement": "x"}]}, "leyline.edits[0].drop"),
    ],
)
def test_bad_options_name_the_field(raw: Any, param: str) -> None:
    """The error says which option is wrong."""
    with pytest.raises(OptionError) as caught:
        parse_options(raw, max_edits=9)
    assert caught.value.param == param


def test_rules_read_items_and_mappings() -> None:
    """``role=mode`` items and mappings say the same; what isn't mapped is exact."""
    rules = UndeclaredRules.parse(["tool=amortize", "user=exact"])
    assert (rules.roles, rules.exact) == ({"tool"}, {"user"})
    assert rules.amortizes("function") and not rules.amortizes("user")
    with pytest.raises(OptionError):
        UndeclaredRules.parse(["tool"])


def test_the_most_specific_name_of_a_session_wins() -> None:
    """Our own header, then the harness's, then body fields, then none."""
    body = {"prompt_cache_key": "k", "metadata": {"session_id": "m"}, "user": "u"}
    headers = {"session_id": "codex"}
    assert session_key({**headers, "x-leyline-session": "own"}, body)[0] == "own"
    assert session_key(headers, body) == ("codex", "session_id")
    assert session_key({}, body) == ("k", "prompt_cache_key")
    assert session_key({}, {"user": "u"}) == ("u", "user")
    assert session_key({}, {"metadata": "x"})[0] is None


@given(st.lists(st.integers(0, 2**64 - 1)), st.lists(st.integers(0, 2**64 - 1)))
def test_chains_agree_as_far_as_the_histories(first: list[int], second: list[int]) -> None:
    """Chain values are equal exactly on the common beginning."""
    shared = 0
    while shared < min(len(first), len(second)) and first[shared] == second[shared]:
        shared += 1
    pairs = zip(history_chain(first), history_chain(second), strict=False)
    assert [a == b for a, b in pairs] == [i < shared for i in range(min(len(first), len(second)))]


@pytest.mark.parametrize("kind", ["list", "object"])
def test_depth_is_limited_before_anything_recurses(kind: str) -> None:
    """Down to the limit a message passes and has a fingerprint; one level more names it."""

    def nested(levels: int) -> dict[str, Any]:
        value: Any = [] if kind == "list" else {}
        for _ in range(levels - 2):
            value = [value] if kind == "list" else {"x": value}
        return {"role": "user", "content": "c", "x": value}

    (message,) = check_messages([nested(MAX_DEPTH)])
    assert fingerprint(message)
    for levels in (MAX_DEPTH + 1, 5000):
        with pytest.raises(MessageError, match="128 levels") as caught:
            check_messages([{"role": "user", "content": "c"}, nested(levels)])
        assert caught.value.param == "messages[1]"


@given(st.integers(0, 4))
def test_a_list_is_checked_from_where_it_is_new(known: int) -> None:
    """Messages that have been checked aren't checked again."""
    messages: list[Message] = [
        {"role": "user", "content": [{"type": "text", "text": "a task"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "a listing", "cache_control": {}},
        {"role": "user", "content": "a task"},
    ]
    assert check_messages(messages, known) is messages
    wrong: list[Message] = [{"role": "wizard"}] * known
    assert check_messages([*wrong, *messages], known)
