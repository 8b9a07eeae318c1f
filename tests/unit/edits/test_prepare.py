"""The provenance of what policies and callers change."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plugin_kit import Plugin

from leyline_engine.contract import Mode
from leyline_policies import Context
from leyline_proxy.edits.prepare import prepare, unedited
from leyline_proxy.model.messages import Message, fingerprint, text_of
from leyline_proxy.model.prepared import Change
from leyline_proxy.request.declared import DeclaredEdit

CALL = {"id": "c", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
TALK: tuple[Message, ...] = (
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "a task"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "a listing", "cache_control": {}},
    {"role": "user", "content": "a task"},
)


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def test_policies_leave_their_provenance() -> None:
    """A changed, a dropped and an inserted message name the policy and its mode."""
    client = [_user("a"), {"role": "assistant", "content": "b"}, _user("c")]
    shortened = Plugin(
        lambda ms, _: [_user("A"), {"role": "system", "content": "s"}, ms[2]], mode="forget"
    )
    prepared = prepare(client, [shortened], [], 0)
    change = Change("policy:plugin", Mode.FORGET)
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
    """The messages continue unedited, and the fault has a name."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}
    client = [
        _user("a"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "r"},
        _user("b"),
    ]
    prepared = prepare(client, [Plugin(lambda ms, _: function(ms))], [], 0)
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

    def refuse(messages: list[Message], context: Context) -> Any:
        raise RuntimeError("asked")

    asked, spared = Plugin(refuse), Plugin(refuse)
    spared.edits = False  # type: ignore[attr-defined]
    messages = [_user("hello")]
    assert prepare(messages, [spared], (), 0).faults == ()
    assert [fault.fault for fault in prepare(messages, [asked], (), 0).faults] == ["raised"]


@given(st.lists(st.sampled_from(TALK), max_size=8))
def test_messages_that_nobody_edits_need_no_pipeline(messages: list[Message]) -> None:
    """They are prepared as a pipeline without policies prepares them."""
    client = tuple(messages)
    prints = [fingerprint(message) for message in client]
    short, long = unedited(client, prints), prepare(client, (), (), 3, fingerprints=prints)
    assert short == long
    assert short.client_fingerprints == long.client_fingerprints
    assert short.sent_fingerprints == long.sent_fingerprints
    assert short.messages == long.messages
