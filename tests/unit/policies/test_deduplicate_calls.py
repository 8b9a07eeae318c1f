"""deduplicate_calls, case by case."""

from __future__ import annotations

from typing import Any

import pytest
from tool_talks import USER, asks, call, contents, result, sent

from leyline_policies import Message
from leyline_policies.builtin.deduplicate_calls import DeduplicateCalls

STUB = DeduplicateCalls().placeholder


def _calls(*asked: Any, tool: str = "grep") -> list[Message]:
    messages = [USER]
    for place, arguments in enumerate(asked):
        messages += [asks(call(f"c{place}", tool, arguments)), result(f"c{place}", f"out {place}")]
    return messages


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ('{"a": 1, "b": {"c": 2, "d": 3}}', '{"b":{"d":3,"c":2},"a":1}', True),
        ('{"a": 1, "b": null}', '{"a": 1}', True),
        ('{"a": 1}', '{"a": 2}', False),
        ('{"a": [1, 2]}', '{"a": [2, 1]}', False),
        ('{"a": "1"}', '{"a": 1}', False),
        ("no json", "no json", True),
        ("no json", "no  json", False),
        ({"a": 1}, '{"a": 1}', True),
    ],
)
def test_arguments_are_compared_as_json(first: Any, second: Any, same: bool) -> None:
    """Equal arguments in other words are a repetition; others are not."""
    after = contents(sent(DeduplicateCalls(), _calls(first, second)))
    assert after == [STUB if same else "out 0", "out 1"]


def test_only_the_newest_result_stays_whole() -> None:
    """Of three equal calls two lose their result; the calls stay."""
    messages = _calls("{}", "{}", "{}")
    after = sent(DeduplicateCalls(), messages)
    assert contents(after) == [STUB, STUB, "out 2"]
    assert [m for m in after if "tool_calls" in m] == [m for m in messages if "tool_calls" in m]


def test_another_tool_is_another_call() -> None:
    """The same arguments to two tools are no repetition."""
    messages = [*_calls("{}"), asks(call("x", "find", "{}")), result("x", "found")]
    assert sent(DeduplicateCalls(), messages) == messages


def test_excluded_tools_are_left_alone() -> None:
    """By default they are those that change something; a list of one's own replaces them."""
    assert contents(sent(DeduplicateCalls(), _calls("{}", "{}", tool="write"))) == [
        "out 0",
        "out 1",
    ]
    policy = DeduplicateCalls(exclude_tools=("grep",), placeholder="-")
    assert contents(sent(policy, _calls("{}", "{}"))) == ["out 0", "out 1"]
    assert contents(sent(policy, _calls("{}", "{}", tool="write"))) == ["-", "out 1"]


def test_a_call_without_a_result_replaces_none() -> None:
    """The result there is stays until the repeated call has one."""
    assert contents(sent(DeduplicateCalls(), _calls("{}", "{}")[:-1])) == ["out 0"]


def test_calls_of_one_message_and_older_forms_count() -> None:
    """Parallel calls, the older ``function_call`` and custom tools are compared as well."""
    custom = {"id": "k", "type": "custom", "custom": {"name": "sh", "input": "ls"}}
    again = {**custom, "id": "l"}
    messages: list[Message] = [
        USER,
        asks(call("a", "grep", "{}"), call("b", "grep", "{}")),
        result("a", "one"),
        result("b", "two"),
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "three"},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{ }"}},
        {"role": "function", "name": "f", "content": "four"},
        asks(custom),
        result("k", "five"),
        asks(again),
        result("l", "six"),
    ]
    after = contents(sent(DeduplicateCalls(), messages))
    assert after == [STUB, "two", STUB, "four", STUB, "six"]
