"""Verdicts of earlier turns come to the same edits as the policies that gave them."""

from __future__ import annotations

from typing import Any

import pytest

from leyline_policies import Message, Policy, load_pipeline
from leyline_policies.policy import function_policy
from leyline_policies.verbs import quarantine
from leyline_proxy.edits.prepare import prepare
from leyline_proxy.model.prepared import Prepared, Quarantined

CALLS = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
TALK: list[Message] = [
    {"role": "system", "content": "Be careful."},
    {"role": "user", "content": "Look."},
    {"role": "assistant", "content": "poison", "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "c", "content": "the poison of a page " * 9},
    {"role": "user", "content": "Well?"},
]


def judge(messages: list[Message], turn_idx: int) -> list[Message]:
    """Condemn whatever names poison."""
    return [quarantine(m) if "poison" in str(m["content"]) else m for m in messages]


def annotated() -> list[Message]:
    """The talk with the caller's own verdicts."""
    said = {"leyline": {"verdict": "quarantine"}}
    return [{**m, **said} if "poison" in str(m["content"]) else m for m in TALK]


PLUGIN = function_policy(name="judge", forgets=True)(judge)
BUILT_IN = load_pipeline("quarantine:rules=[],patterns=[poison]")
BOTH = {2: Quarantined("verbs", "verdict"), 3: Quarantined("verbs", "verdict")}
CASES: list[tuple[list[Policy], list[Message], dict[int, Quarantined]]] = [
    ([PLUGIN], TALK, BOTH),
    ([], annotated(), BOTH),
    (BUILT_IN, TALK, {3: Quarantined("quarantine", "pattern")}),
]


@pytest.mark.parametrize(("policies", "messages", "found"), CASES)
def test_the_edit_is_the_same_on_each_turn(
    policies: list[Policy], messages: list[Message], found: dict[int, Quarantined]
) -> None:
    """With the verdict alone, with its policy alone, and with both: so nothing is forgotten twice
    because the reason has changed."""
    first = prepare(messages, policies, (), 0)
    assert first.quarantined == found
    assert first.forget_marks.keys() == found.keys()
    for again in (
        prepare(TALK, [], (), 1, condemned=found),
        prepare(messages, policies, (), 1, condemned=found),
    ):
        assert again.messages == first.messages
        assert again.forget_marks == first.forget_marks
        assert (again.quarantined, again.faults) == (found, ())
        assert [entry.changes for entry in again.sent] == [entry.changes for entry in first.sent]
    assert "poison" not in repr([first.messages[place] for place in found])


def test_a_later_policy_does_not_hide_the_verdict() -> None:
    """A policy that drops the stub, amortized, leaves it in quarantine."""

    def drop_results(messages: list[Message], turn_idx: int) -> list[Message]:
        return [m for m in messages if m["role"] != "tool" and not m.get("tool_calls")]

    dropping = function_policy(name="dropping")(drop_results)
    done: Prepared = prepare(annotated(), [dropping], (), 0)
    assert [m["role"] for m in done.messages] == ["system", "user", "user"]
    assert done.quarantined == BOTH
    assert done.forget_marks.keys() == {2, 3}


def test_a_text_that_looks_like_a_stub_is_none() -> None:
    """Words of a client's own, or of a policy that shortens, put nothing into quarantine."""
    said: list[Any] = [*TALK[:3], {**TALK[3], "content": "[quarantined: verdict]"}, TALK[4]]
    assert prepare(said, [], (), 0).quarantined == {}

    def shorten(messages: list[Message], turn_idx: int) -> list[Message]:
        return [
            {**m, "content": "[quarantined: x]"} if m["role"] == "tool" else m for m in messages
        ]

    assert prepare(TALK, [function_policy(name="short")(shorten)], (), 0).quarantined == {}
