"""Lists that a caller can make long cost time that grows with their length, whatever is in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from support.linear import check_linear
from working_set_kit import option

from leyline_engine.contract import Mode
from leyline_policies import Context, Memo
from leyline_policies.builtin.clear_tool_uses import ClearToolUses
from leyline_proxy.apis.responses.truncation import with_dropped
from leyline_proxy.edits.materialised import Shelf, planned_set
from leyline_proxy.edits.running import PolicySession
from leyline_proxy.edits.stage import client_stage
from leyline_proxy.model.messages import Message
from leyline_proxy.model.prepared import Change, DroppedMessage

LONG = "x" * 99


def test_a_working_set_of_a_list_whose_messages_were_dropped_costs_one_pass() -> None:
    """Each dropped message is known by its place."""
    shelf = Shelf(option("tag:none"), 100)

    def find(count: int) -> Callable[[], object]:
        talk = tuple({"role": "user", "content": str(at)} for at in range(count))
        untouched = client_stage(talk, Memo())
        change = Change("policy:p", Mode.AMORTIZE)
        dropped = tuple(DroppedMessage(at, change) for at in range(count - 1))
        done = replace(untouched, sent=untouched.sent[-1:], dropped=dropped)
        return partial(planned_set, shelf, untouched, done, (), PolicySession())

    check_linear(find, 400)


def test_truncation_declares_its_drops_in_one_pass() -> None:
    """The request's own edits are looked up by message."""

    def drop(count: int) -> Callable[[], object]:
        messages = [{"role": "user", "content": "x"}] * (2 * count)
        own = [{"message": at, "replacement": ""} for at in range(2 * count)]
        body: dict[str, Any] = {"messages": messages, "leyline": {"edits": own}}
        return partial(with_dropped, body, [(at,) for at in range(count)])

    check_linear(drop, 500)


def test_inputs_of_many_calls_of_a_message_are_cleared_at_once() -> None:
    """The message is edited once for all its calls."""
    policy = ClearToolUses(trigger_tokens=0, keep=0, clear_tool_inputs=True, clear_at_least=1)

    def clear(count: int) -> Callable[[], object]:
        calls = [
            {"id": f"c{at}", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
            for at in range(count)
        ]
        talk: list[Message] = [{"role": "assistant", "content": None, "tool_calls": calls}]
        talk += [
            {"role": "tool", "tool_call_id": f"c{at}", "content": "x" * 99} for at in range(count)
        ]

        def run() -> None:
            assert policy.transform(talk, 0, Context())[0] != talk[0]

        return run

    check_linear(clear, 100)
