"""The forgets, pins and shortenings of policies and verbs, in one list and over turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from plugin_kit import FUNCTION, TALK, Plugin, Transform, at, run, said

from leyline_engine.contract import Mode
from leyline_policies import Context, drop, edit, load_pipeline, map_text
from leyline_policies.verbs import decay, forget, pin
from leyline_proxy.edits.prepare import PolicySession
from leyline_proxy.edits.schedule import pending
from leyline_proxy.model.messages import Message
from leyline_proxy.model.prepared import Change


def named(message: Message) -> bool:
    """Return True if it is the user's first message, or made from it."""
    return message.get("name") == "first"


def wherever(change: Callable[[Message], list[Message]]) -> Transform:
    """A transform of the user's first message, if it is still there."""
    return lambda ms, _: [each for m in ms for each in (change(m) if named(m) else [m])]


SHORTEN = at(1, lambda m: edit(m, stub="[short]"))


def test_a_pin_does_not_hold_back_a_forget() -> None:
    """A message that is pinned and to be forgotten goes, at anyone's demand."""
    verbs = run(client=said(1, pin=True, forget=True))
    assert "a question" not in str(verbs.messages)
    assert list(verbs.forget_marks) == [1]
    marks = run(Plugin(at(1, lambda m: drop(m, mode="forget"))), client=said(1, pin=True))
    assert "a question" not in str(marks.messages)
    assert list(marks.forget_marks) == [1]
    assert "a question" in str(run(Plugin(at(1, drop)), client=said(1, pin=True)).messages)


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize(
    "after",
    [
        wherever(lambda m: [edit(m, stub="[again]")]),
        wherever(lambda m: [{"role": m["role"], "content": "by hand"}]),
        wherever(lambda m: [drop(m, mode="amortize")]),
        wherever(lambda m: []),
        lambda ms, _: [*(m for m in ms[:-1] if not named(m)), *filter(named, ms), ms[-1]],
    ],
    ids=["edits", "copies", "drops", "leaves out", "moves"],
)
@pytest.mark.parametrize(
    "first",
    [
        at(1, lambda m: edit(m, content="a", mode="forget", cause="secret")),
        at(1, forget),
    ],
    ids=["mark", "verb"],
)
def test_a_forget_of_one_message_survives_what_later_policies_do(
    first: Transform, after: Transform, trusted: bool
) -> None:
    """The demand stays if the message is later edited, moved or dropped."""
    prepared = run(Plugin(first, "first", trusted=trusted), Plugin(after, trusted=trusted))
    assert prepared.faults == ()
    assert list(prepared.forget_marks) == [1]
    assert "a question" not in str(prepared.messages)


@pytest.mark.parametrize("trusted", [True, False])
def test_a_forget_finds_a_message_that_a_policy_moved(trusted: bool) -> None:
    """A moved message is still the client's message that the engine has read."""
    move = Plugin(lambda ms, _: [ms[0], *ms[2:-1], ms[1], ms[-1]], "moves", trusted=trusted)
    secret = Plugin(at(4, lambda m: edit(m, content="x", mode="forget")), trusted=trusted)
    prepared = run(move, secret)
    assert prepared.faults == ()
    assert prepared.messages[4]["content"] == "x"
    assert list(prepared.forget_marks) == [1]


def test_a_second_forget_of_a_message_is_a_new_demand() -> None:
    """A message's earlier redaction must not hide that more of it is to be forgotten now."""
    redact = load_pipeline("redact:pattern=hunter2")
    client = [{"role": "user", "content": "hunter2 and more"}, *TALK]
    once = run(*redact, client=client)
    more = Plugin(at(0, lambda m: edit(m, content="", mode="forget")), "more")
    twice = run(*redact, more, client=client)
    assert twice.messages[0]["content"] == ""
    assert twice.forget_marks[0] != once.forget_marks[0]
    assert pending(once, run(*redact, more, client=[*client, TALK[1]])) is None


def test_what_tidies_up_a_forgotten_message_makes_no_new_demand() -> None:
    """Shortening it later must not throw the cache away again."""
    secret = Plugin(at(1, lambda m: edit(m, content="a", mode="forget")), "secret")
    once, later = run(secret), run(secret, Plugin(SHORTEN))
    assert later.messages[1]["content"] == "[short]"
    assert later.forget_marks == once.forget_marks


def test_one_policy_may_edit_a_message_twice() -> None:
    """The strictest of what it says of the edits holds, and of another policy's it says nothing."""

    def twice(message: Message) -> Message:
        return map_text(edit(message, content="ab", mode="forget", cause="pii"), str.upper)

    for trusted in (True, False):
        prepared = run(
            Plugin(at(1, twice), trusted=trusted), Plugin(SHORTEN, "later", trusted=trusted)
        )
        assert prepared.sent[1].changes == (
            Change("policy:plugin:pii", Mode.FORGET),
            Change("policy:later", Mode.AMORTIZE),
        )


def test_a_forgotten_call_keeps_no_arguments() -> None:
    """The call stays answered, but of what was said in it nothing is sent."""
    client = said(2, forget=True)
    client[2]["reasoning_content"] = "the key is hunter2"
    prepared = run(client=client)
    assert prepared.faults == ()
    assert "hunter2" not in str(prepared.messages)
    assert prepared.messages[2]["tool_calls"][0]["id"] == "c"
    old = {"role": "assistant", "content": None, "function_call": FUNCTION}
    answered = [old | {"leyline": {"forget": True}}, *TALK]
    assert "hunter2" not in str(run(client=answered).messages[0])


def test_one_senseless_annotation_costs_no_other_its_effect() -> None:
    """A policy may write things that no request could; forgets continue."""

    def annotate(messages: list[Message], context: Context) -> list[Message]:
        del context
        odd = edit(messages[3], leyline={"decay": {"turns": "3", "seconds": [1]}})
        return [messages[0], forget(messages[1]), messages[2], odd, *messages[4:]]

    prepared = run(Plugin(annotate))
    assert prepared.faults == ()
    assert list(prepared.forget_marks) == [1]


def test_more_messages_with_a_time_than_can_be_remembered_cost_no_forget() -> None:
    """A list of thousands that decay is served, and what is to be forgotten is."""
    many = [
        {"role": "user", "content": f"{n}", "leyline": {"decay": {"seconds": 9}}}
        for n in range(3000)
    ]
    client = [*said(1, forget=True), *many, TALK[-1]]
    states: Any = {}
    for elapsed in (0.0, 5.0):
        prepared = run(client=client, session=PolicySession(states=states, elapsed_s=elapsed))
        states = prepared.states
        assert prepared.faults == ()
        assert list(prepared.forget_marks) == [1]


def test_what_has_gone_is_not_remembered_as_decaying() -> None:
    """The state of a long session holds what it still has."""
    states: Any = {}
    for turn in range(2000):
        note = {"role": "user", "content": f"note {turn}", "leyline": {"decay": {"seconds": 9}}}
        session = PolicySession(states=states, elapsed_s=float(turn))
        prepared = run(client=[note, TALK[-1]], session=session)
        assert prepared.faults == ()
        states = prepared.states
    assert len(str(states)) < 200


def test_a_time_that_a_policy_gives_a_message_passes() -> None:
    """It is remembered from turn to turn beside those that the client gives."""
    policy = Plugin(at(1, lambda m: decay(m, seconds=5)))
    for client in (TALK, said(0, tags=["x"])):
        states: Any = {}
        gone = []
        for elapsed in (0.0, 3.0, 6.0):
            session = PolicySession(states=states, elapsed_s=elapsed)
            prepared = run(policy, client=client, session=session)
            states = prepared.states
            gone.append("a question" not in str(prepared.messages))
        assert gone == [False, False, True]


# Pins


@pytest.mark.parametrize("trusted", [True, False])
def test_a_pinned_result_keeps_its_call(trusted: bool) -> None:
    """A policy that drops pairs loses no other edit over it."""

    def tidy(messages: list[Message], context: Context) -> list[Message]:
        del context
        return [edit(messages[0], content="brief"), *messages[1:2], *messages[4:]]

    for index in (2, 3):
        prepared = run(Plugin(tidy, trusted=trusted), client=said(index, pin=True))
        assert prepared.faults == ()
        assert [m["role"] for m in prepared.messages] == [m["role"] for m in TALK]
        assert prepared.messages[0]["content"] == "brief"


def test_a_policy_may_pin() -> None:
    """Later changes leave the message alone."""
    prepared = run(Plugin(at(1, pin)), Plugin(SHORTEN))
    assert prepared.messages == TALK
