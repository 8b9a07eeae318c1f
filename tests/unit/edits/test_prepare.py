"""Message diffs, and the provenance of what policies and callers change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_engine.contract import Mode
from leyline_proxy.edits.prepare import prepare
from leyline_proxy.model.diff import apply_chars, apply_diff, diff_messages
from leyline_proxy.model.messages import Message, fingerprint, text_of
from leyline_proxy.model.prepared import Change
from leyline_proxy.request.declared import DeclaredEdit

MESSAGES = st.lists(
    st.builds(
        lambda role, text: {"role": role, "content": text},
        st.sampled_from(["user", "assistant"]),
        st.text("ab", max_size=3),
    ),
    max_size=8,
)


class Rule:
    """A policy made of a function."""

    def __init__(self, function: Callable[[list[Message]], Any], mode: str = "amortize") -> None:
        self.name, self.mode, self._function = "rule", mode, function

    def transform(self, messages: list[Message], turn_idx: int) -> Any:
        return self._function(messages)


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


@given(MESSAGES, MESSAGES)
def test_a_diff_turns_old_into_new(old: list[Message], new: list[Message]) -> None:
    """Applying it gives the new list; its character edits give the new texts."""
    diff = diff_messages(old, new)
    assert list(map(fingerprint, apply_diff(old, diff, new))) == list(map(fingerprint, new))
    assert [s.old for s in diff.steps if s.old is not None] == list(range(len(old)))
    assert [s.new for s in diff.steps if s.new is not None] == list(range(len(new)))
    for step in diff.steps:
        if step.kind == "replaced" and step.old is not None and step.new is not None:
            assert apply_chars(text_of(old[step.old]), step.chars) == text_of(new[step.new])


@given(MESSAGES.filter(bool), st.data())
def test_a_single_edit_is_a_single_step(old: list[Message], data: st.DataObject) -> None:
    """Changing, removing or adding one message changes one step."""
    place = data.draw(st.integers(0, len(old) - 1))
    fresh = {**old[place], "content": "unlike all others"}
    for new in (
        [*old[:place], fresh, *old[place + 1 :]],
        [*old[:place], *old[place + 1 :]],
        [*old[:place], fresh, *old[place:]],
    ):
        assert sum(step.kind != "kept" for step in diff_messages(old, new).steps) == 1


def test_policies_leave_their_provenance() -> None:
    """A changed, a dropped and an inserted message name the policy and its mode."""
    client = [_user("a"), {"role": "assistant", "content": "b"}, _user("c")]
    shortened = Rule(lambda ms: [_user("A"), {"role": "system", "content": "s"}, ms[2]], "forget")
    prepared = prepare(client, [shortened], [], 0)
    change = Change("policy:rule", Mode.FORGET)
    assert [(s.client_index, s.changes) for s in prepared.sent] == [
        (0, (change,)),
        (None, (change,)),
        (2, ()),
    ]
    assert [(d.client_index, d.change) for d in prepared.dropped] == [(1, change)]
    assert client[0] == _user("a")


def _raise(messages: list[Message]) -> Any:
    raise RuntimeError


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        (_raise, "raised"),
        (lambda ms: None, "bad_type"),
        (lambda ms: [*ms, 3], "bad_type"),
        (lambda ms: [{"role": "wizard", "content": "x"}, *ms], "bad_message"),
        (lambda ms: [{**ms[0], "x": object()}, *ms[1:]], "bad_message"),
        (lambda ms: [m for m in ms if m["role"] != "assistant"], "broken_pair"),
        (lambda ms: [m for m in ms if m["role"] != "tool"], "broken_pair"),
        (lambda ms: ms[:-1], "lost_last_user"),
    ],
)
def test_a_faulty_policy_costs_only_itself(function: Any, fault: str) -> None:
    """The messages go on unedited, and the fault has a name."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}
    client = [
        _user("a"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "r"},
        _user("b"),
    ]
    prepared = prepare(client, [Rule(function)], [], 0)
    assert [f.fault for f in prepared.faults] == [fault]
    assert prepared.messages == client


def test_declared_edits_rewrite_drop_or_only_declare() -> None:
    """Characters count over all text parts; a declaration alone changes nothing."""
    parts = [{"type": "text", "text": "abc"}, {"type": "text", "text": "def"}]
    client = [_user("x"), {"role": "user", "content": parts}, _user("y"), _user("z")]
    edits = [
        DeclaredEdit(message=1, chars=(2, 4), replacement="-"),
        DeclaredEdit(message=2, drop=True),
        DeclaredEdit(message=3, mode=Mode.FORGET),
    ]
    prepared = prepare(client, [], edits, 0)
    assert [text_of(m) for m in prepared.messages] == ["x", "ab-ef", "z"]
    assert prepared.sent[2].changes == (Change("declared", Mode.FORGET, callers_own=True),)
    assert [d.client_index for d in prepared.dropped] == [2]


def test_a_policy_that_never_edits_is_not_run() -> None:
    """One that says so is left out; another with the same function is asked."""

    def refuse(messages: list[Message]) -> Any:
        raise RuntimeError("asked")

    asked, spared = Rule(refuse), Rule(refuse)
    spared.edits = False  # type: ignore[attr-defined]
    messages = [_user("hello")]
    assert prepare(messages, [spared], (), 0).faults == ()
    assert [fault.fault for fault in prepare(messages, [asked], (), 0).faults] == ["raised"]
