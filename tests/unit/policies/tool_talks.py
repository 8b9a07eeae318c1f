"""Conversations with tool results, for the tests of the policies that act on them."""

from __future__ import annotations

import copy
import json
from typing import Any

from leyline_policies import Message, Policy
from leyline_policies.context import Context, apply

SYSTEM: Message = {"role": "system", "content": "You are an agent."}
USER: Message = {"role": "user", "content": "Fix it."}


def call(identity: str, tool: str = "bash", arguments: str = '{"command": "ls"}') -> dict[str, Any]:
    """One entry of ``tool_calls``."""
    function = {"name": tool, "arguments": arguments}
    return {"id": identity, "type": "function", "function": function}


def asks(*calls: dict[str, Any], content: Any = None) -> Message:
    """An assistant message that makes these calls."""
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def result(identity: str, content: Any, **more: Any) -> Message:
    """The answer to a call."""
    return {"role": "tool", "tool_call_id": identity, "content": content, **more}


def steps(*results: tuple[str, Any], start: int = 0) -> list[Message]:
    """For each tool and content, a call and its result."""
    messages: list[Message] = []
    for number, (tool, content) in enumerate(results, start):
        messages += [asks(call(f"c{number}", tool)), result(f"c{number}", content)]
    return messages


def talk(*results: tuple[str, Any]) -> list[Message]:
    """Instructions, a task and `steps`."""
    return [SYSTEM, USER, *steps(*results)]


def contents(messages: list[Message]) -> list[Any]:
    """The contents of the tool results."""
    return [message["content"] for message in messages if message["role"] in ("tool", "function")]


def sent(policy: Policy, messages: list[Message], context: Context | None = None) -> list[Message]:
    """Return the messages that ``policy`` makes, once it has proven not to change its input.

    Messages that it doesn't edit must be the given objects, and the same context must give the
    same again.
    """
    context = context or Context()
    before = copy.deepcopy(messages)
    after = apply(policy, messages, context.turn, context)
    assert messages == before
    assert all(new is old or new != old for old, new in zip(messages, after, strict=True))
    json.dumps(context.state)
    assert apply(policy, messages, context.turn, context) == after
    return after
