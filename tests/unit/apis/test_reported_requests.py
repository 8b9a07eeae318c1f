"""Requests of real clients that other gateways were reported to map wrongly."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic_talks import USE, chat, user
from support.responses_talks import chat as chat_of_items
from support.responses_talks import gave, said

ONE, TWO = ({"type": "tool_result", "tool_use_id": name, "content": name} for name in ("t1", "t2"))
TEXT = {"type": "text", "text": "A reminder."}
EMPTY = {"type": "text", "text": ""}
PICTURE = {"type": "image", "source": {"type": "url", "url": "http://a/b.png"}}


@pytest.mark.parametrize(
    ("content", "roles"),
    [
        ([TEXT, ONE], ["tool", "user"]),
        ([ONE, TEXT, TWO], ["tool", "tool", "user"]),
        ([PICTURE, ONE, TEXT], ["tool", "user"]),
        ([ONE, EMPTY], ["tool"]),
        ([EMPTY, TEXT], ["user"]),
        ([EMPTY], ["user"]),
        ([], ["user"]),
    ],
)
def test_results_follow_their_calls(content: list[dict[str, Any]], roles: list[str]) -> None:
    """A client may put a text in front of a result or between two: the engine gets all results
    right after the calls, then one message with the rest, and no turn that says nothing."""
    calls = {"role": "assistant", "content": [USE, {**USE, "id": "t2"}]}
    messages = chat([{"role": "user", "content": "Go."}, calls, *user(*content)])[2:]
    assert [message["role"] for message in messages] == roles


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ('{"path": ', {"INVALID_JSON": '{"path": '}),
        ("[]", {"INVALID_JSON": "[]"}),
        ('{"a": "b\nc"}', {"INVALID_JSON": '{"a": "b\nc"}'}),
        ("null", {}),
        ("", {}),
        (" ", {}),
        ('{"b":1,  "a":2}', None),
    ],
)
def test_arguments_that_broke_off_end_no_session(written: str, read: Any) -> None:
    """Calls in a history of the Responses API always have an object as arguments, because engines
    refuse others on this and every later turn; those that are one stay as they came."""
    call = {"type": "function_call", "call_id": "c1", "name": "ls", "arguments": written}
    asked = chat_of_items([said("Go."), call, gave("x", "c1")])[1]
    arguments = asked["tool_calls"][0]["function"]["arguments"]
    assert arguments == written if read is None else json.loads(arguments) == read
