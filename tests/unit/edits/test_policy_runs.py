"""Policies in a turn: what they may know, what they leave, how their edits are marked."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plugin_kit import Plugin, at, run

from leyline_engine.contract import Mode
from leyline_policies import Context, Memo, Policy, drop, edit
from leyline_policies.verbs import share
from leyline_proxy.edits.prepare import PolicySession, PolicyTimeoutError
from leyline_proxy.model.messages import Message, fingerprint, text_of
from leyline_proxy.model.prepared import Change

SHORTEN = at(1, lambda m: edit(m, stub="[short]"))

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}
TALK: list[Message] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "a question"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "a long result"},
    {"role": "user", "content": "the last question"},
]
_run = partial(run, client=TALK)


@pytest.mark.parametrize("trusted", [True, False])
def test_marks_name_mode_and_cause_of_single_edits(trusted: bool) -> None:
    """An edit, a drop and an unmarked change of one policy are distinguished."""

    def transform(messages: list[Message], context: Context) -> list[Message]:
        del context
        return [
            drop(messages[0], cause="stale"),
            {**messages[1], "content": "another"},
            messages[2],
            edit(messages[3], stub="[gone]", mode="forget", cause="secret"),
            messages[4],
        ]

    prepared = _run(Plugin(transform, trusted=trusted))
    plain = Change("policy:plugin", Mode.AMORTIZE)
    assert [(entry.client_index, entry.changes) for entry in prepared.sent] == [
        (1, (plain,)),
        (2, ()),
        (3, (Change("policy:plugin:secret", Mode.FORGET),)),
        (4, ()),
    ]
    assert prepared.dropped[0].change == Change("policy:plugin:stale", Mode.AMORTIZE)
    assert prepared.messages[2]["content"] == "[gone]"
    assert list(prepared.forget_marks) == [3]
    assert prepared.faults == ()


def test_edits_of_equal_looking_messages_are_told_by_their_origin() -> None:
    """Comparing texts would pair the wrong ones; the edited message names its origin."""
    client = [{"role": "user", "content": text} for text in ("a", "b", "c")]

    def transform(messages: list[Message], context: Context) -> list[Message]:
        del context
        return [edit(messages[1], content="x"), messages[2]]

    prepared = _run(Plugin(transform), client=client)
    assert [entry.client_index for entry in prepared.sent] == [1, 2]
    assert [item.client_index for item in prepared.dropped] == [0]
    compared = _run(Plugin(lambda ms, _: [{**ms[1], "content": "x"}, ms[2]]), client=client)
    assert [entry.client_index for entry in compared.sent] == [0, 2]


def _mutate(messages: list[Message], context: Context) -> list[Message]:
    messages[1]["content"] = "changed in place"
    return messages


def _fill(messages: list[Message], context: Context) -> list[Message]:
    context.state["text"] = "x" * 20_000
    return messages[:]


def _unjson(messages: list[Message], context: Context) -> list[Message]:
    context.state["set"] = {1, 2} and object()
    return messages[:]


@pytest.mark.parametrize(
    ("function", "fault"), [(_mutate, "mutated"), (_fill, "bad_state"), (_unjson, "bad_state")]
)
def test_a_policy_that_breaks_a_rule_is_left_out(function: Any, fault: str) -> None:
    """The turn continues with the client's messages, and the fault has a name."""
    prepared = _run(Plugin(function))
    assert [(f.policy, f.fault) for f in prepared.faults] == [("plugin", fault)]
    assert prepared.messages == TALK
    assert TALK[1]["content"] == "a question"


def test_a_trusted_policy_that_breaks_a_rule_is_found_out() -> None:
    """The others' edits stay."""
    bad = Plugin(lambda ms, _: ms[:-1], name="bad", trusted=True)
    good = Plugin(lambda ms, _: [edit(ms[0], content="ok"), *ms[1:]], name="good", trusted=True)
    prepared = _run(bad, good)
    assert [(f.policy, f.fault) for f in prepared.faults] == [("bad", "lost_last_user")]
    assert prepared.messages == [{"role": "system", "content": "ok"}, *TALK[1:]]


def test_a_limit_that_is_passed_is_a_fault_of_the_policy() -> None:
    """A policy that runs into the time limit is left out; a trusted policy is not limited."""

    def never(call: Callable[[], list[Message]]) -> list[Message]:
        raise PolicyTimeoutError("the call takes too long")

    session = PolicySession(limit=never)
    slow = Plugin(lambda ms, _: ms, name="slow")
    trusted = Plugin(lambda ms, _: ms[:], name="trusted", trusted=True)
    prepared = _run(slow, trusted, session=session)
    assert [(f.policy, f.fault) for f in prepared.faults] == [("slow", "timed_out")]


def test_state_is_kept_from_turn_to_turn_by_place() -> None:
    """A policy finds what it left and no one else's, and a failing turn loses nothing."""

    def count(messages: list[Message], context: Context) -> list[Message]:
        context.state["turns"] = context.state.get("turns", 0) + 1
        if context.state["turns"] == 3:
            raise RuntimeError
        return messages[:]

    policies = (Plugin(count, name="one"), Plugin(lambda ms, _: ms[:], name="two"))
    states: Any = {}
    for expected in (1, 2, 2):
        states = _run(*policies, session=PolicySession(states=states)).states
        assert states["0.one"] == {"turns": expected}
        assert not states.get("1.two")


def test_a_forgetting_policy_counts_a_turn_once() -> None:
    """It runs on the client's text and again after others, but its state moves once."""

    def count(messages: list[Message], context: Context) -> list[Message]:
        context.state["runs"] = context.state.get("runs", 0) + 1
        context.note("ran", times=1)
        return messages[:]

    other = Plugin(lambda ms, _: [edit(ms[0], content="other"), *ms[1:]], name="other")
    prepared = _run(other, Plugin(count, mode="forget", name="counts"))
    assert prepared.states["1.counts"] == {"runs": 1}
    assert [(note.policy, note.kind) for note in prepared.notes] == [("counts", "ran")]


def test_facts_of_the_session_reach_the_policy() -> None:
    """Turn, window, idle time and tokens are what the session says."""
    seen: list[Any] = []

    def look(messages: list[Message], context: Context) -> list[Message]:
        seen.append((context.turn, context.window, context.idle_s, context.model))
        seen.append(context.total(messages))
        return messages

    session = PolicySession(window=100, idle_s=2.5, model="m", count=lambda message: 7)
    _run(Plugin(look), session=session)
    assert seen == [(3, 100, 2.5, "m"), 7 * len(TALK)]


def test_what_was_computed_of_a_message_is_not_computed_again() -> None:
    """Over turns that hold the very same messages, each is looked at once."""
    looked: list[str] = []

    def shout(message: Message) -> Message:
        looked.append(text_of(message))
        return edit(message, content=text_of(message).upper())

    policy = Plugin(lambda ms, ctx: [ctx.once(m, shout) for m in ms], trusted=True)
    session = PolicySession(memo=Memo())
    client = [{"role": "user", "content": text} for text in ("a", "b")]
    first = _run(policy, session=session, client=client)
    session.memo.next_turn()
    second = _run(policy, session=session, client=[*client, {"role": "user", "content": "c"}])
    assert looked == ["a", "b", "c"]
    assert second.messages[0] is first.messages[0]
    assert second.sent_fingerprints == tuple(map(fingerprint, second.messages))


def test_taking_something_sensitive_away_is_a_forget() -> None:
    """It is so whatever the policy says; an edit that leaves it in place keeps its mode."""

    def sensitive(message: Message) -> frozenset[str]:
        return frozenset(word for word in text_of(message).split() if word.startswith("key-"))

    client = [
        {"role": "user", "content": "key-1 and more"},
        {"role": "user", "content": "key-2 and more"},
        {"role": "user", "content": "key-3 goes"},
        {"role": "user", "content": "plain text"},
        {"role": "user", "content": "end"},
    ]

    def transform(messages: list[Message], context: Context) -> list[Message]:
        del context
        one, two, three, four, end = messages
        return [
            edit(one, content="and more"),
            edit(two, content="key-2"),
            drop(three),
            edit(four, content="text"),
            end,
        ]

    prepared = _run(Plugin(transform), session=PolicySession(sensitive=sensitive), client=client)
    modes = [entry.changes[0].mode if entry.changes else None for entry in prepared.sent]
    assert modes == [Mode.FORGET, Mode.AMORTIZE, Mode.AMORTIZE, None]
    assert prepared.dropped[0].change.mode is Mode.FORGET


TEXTS = st.lists(st.text("abc", max_size=3), min_size=1, max_size=7)
FATES = st.lists(st.sampled_from(["keep", "edit", "drop", "copy", "before"]), min_size=7)


@given(TEXTS, FATES, st.booleans())
def test_every_message_is_accounted_for(texts: list[str], fates: list[str], trusted: bool) -> None:
    """Each of the client's messages is sent or dropped, once and in order."""
    client = [{"role": "assistant", "content": text} for text in texts]

    def transform(messages: list[Message], context: Context) -> list[Message]:
        del context
        made: list[Message] = []
        for message, fate in zip(messages, fates, strict=False):
            if fate == "before":
                made.append({"role": "assistant", "content": "new"})
            if fate == "edit":
                made.append(edit(message, stub="edited"))
            elif fate == "copy":
                made.append({**message, "content": "copied"})
            elif fate != "drop":
                made.append(message)
        return made

    policy: Policy = Plugin(transform, trusted=trusted)  # type: ignore[assignment]
    prepared = _run(policy, client=client)
    if prepared.faults:
        return  # nothing was left: a list without messages can't be sent
    kept = [entry.client_index for entry in prepared.sent if entry.client_index is not None]
    gone = [item.client_index for item in prepared.dropped]
    assert sorted(kept + gone) == list(range(len(client)))
    assert kept == sorted(kept)
    for index, fate in enumerate(fates[: len(client)]):
        if fate in ("keep", "before", "edit"):
            assert index in kept
    for entry in prepared.sent:
        if entry.client_index is not None and not entry.changes:
            assert entry.message == client[entry.client_index]


def test_a_policy_may_name_the_scope_to_share_with() -> None:
    """Its words on a message reach the plan, and never the engine's messages."""

    def transform(messages: list[Message], context: Context) -> list[Message]:
        del context
        return [share(messages[0], "team"), *messages[1:]]

    prepared = _run(Plugin(transform, trusted=True))
    assert prepared.scope == "team"
    assert prepared.messages == TALK
    assert _run().scope is None


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize(
    ("outcome", "fault"),
    [
        (lambda ms: None, "bad_type"),
        (lambda ms: [*ms, "text"], "bad_type"),
        (lambda ms: [*ms, {"role": "user", "content": {1, 2}.__iter__()}], "bad_message"),
        (lambda ms: [*ms, {"role": "user", "content": "\ud800"}], "bad_message"),
        (lambda ms: [edit(ms[0], content=object()), *ms[1:]], "bad_message"),
        (lambda ms: [], "bad_message"),
    ],
)
def test_senseless_outcomes_cost_the_policys_own_edits(
    outcome: Any, fault: str, trusted: bool
) -> None:
    """This holds with and without trust, and others' edits stay."""
    good = Plugin(SHORTEN, "good", trusted=True)
    prepared = run(Plugin(lambda ms, _: outcome(ms), trusted=trusted), good)
    assert [(each.policy, each.fault) for each in prepared.faults] == [("plugin", fault)]
    assert prepared.messages == run(good).messages


@pytest.mark.parametrize("error", [SystemExit, GeneratorExit, StopIteration, RecursionError])
def test_a_policy_that_leaves_the_process_is_left_out(error: type[BaseException]) -> None:
    """Plugins call sys.exit, or what does."""

    def leave(messages: list[Message], context: Context) -> list[Message]:
        raise error

    assert [each.fault for each in run(Plugin(leave)).faults] == ["raised"]


def test_what_a_policy_keeps_of_its_messages_is_its_own() -> None:
    """It may change them later; what was sent stays what was sent."""
    banner: Message = {"role": "system", "content": [{"type": "text", "text": "turn 1"}]}
    policy = Plugin(lambda ms, _: [banner, *ms])
    session = PolicySession(memo=Memo())
    first = run(policy, session=session)
    prints = first.sent_fingerprints
    banner["content"][0]["text"] = "turn 2"
    second = run(policy, session=session)
    assert text_of(first.messages[0]) == "turn 1"
    assert text_of(second.messages[0]) == "turn 2"
    assert second.sent_fingerprints != prints


def test_notes_hold_numbers() -> None:
    """The response carries them, so nothing else may be in them."""

    def note(messages: list[Message], context: Context) -> list[Message]:
        context.note("odd", value=text_of(messages[1]))  # type: ignore[arg-type]
        return messages

    prepared = run(Plugin(note))
    assert [each.fault for each in prepared.faults] == ["bad_state"]
    assert prepared.notes == ()


def test_a_state_is_json_of_its_own() -> None:
    """The policy's later changes to it change nothing, and sets become lists."""
    kept: list[Any] = []

    def keep(messages: list[Message], context: Context) -> list[Message]:
        context.state["seen"] = {1}
        kept.append(context.state)
        return messages

    prepared = run(Plugin(keep))
    kept[0]["seen"] = None
    assert prepared.states["0.plugin"] == {"seen": [1]}


def test_a_turn_without_policies_keeps_what_they_left() -> None:
    """A request that chooses none must not undo what the next one's have committed."""
    states = {"0.plugin": {"committed": 3}}
    assert run(session=PolicySession(states=states)).states == states


def test_a_scope_that_is_no_name_is_nobodys() -> None:
    """A policy may say what no request could."""
    for scope in (["x"], "no name", "a\n", 7):
        prepared = run(Plugin(at(1, lambda m, s=scope: edit(m, leyline={"share": s}))))
        assert prepared.faults == ()
        assert prepared.scope is None
