"""While edits wait: nothing is delayed that mustn't be, nothing is left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from plugin_kit import TALK, Plugin, Transform, at, run, said

from leyline_engine.contract import Mode
from leyline_policies import Context, drop, edit, load_pipeline
from leyline_policies.verbs import forget, pin
from leyline_proxy.edits.prepare import prepare
from leyline_proxy.edits.schedule import pending
from leyline_proxy.model.messages import Message
from leyline_proxy.model.prepared import Prepared
from leyline_proxy.request.declared import DeclaredEdit

SHORTEN = at(1, lambda m: edit(m, stub="[short]"))


def turn(client: list[Message], *policies: Any, declared: Any = ()) -> Prepared:
    """One turn of a session, with what the caller declares."""
    return prepare(client, policies, declared, 1)


def test_another_declared_edit_of_the_same_message_does_not_wait() -> None:
    """The caller's declaration holds for the turn that declares it."""
    first, second = (
        [DeclaredEdit(message=1, mode=Mode.AMORTIZE, replacement=text)] for text in ("one", "two")
    )
    last = turn(TALK, declared=first)
    grown = [*TALK, {"role": "user", "content": "go on"}]
    assert pending(last, turn(grown, Plugin(at(4, drop)), declared=second)) is None
    held = pending(last, turn(grown, Plugin(at(4, drop)), declared=first))
    assert held is not None
    assert held.messages[1]["content"] == "one"


def test_a_verb_of_the_caller_does_not_wait() -> None:
    """Evict means now."""
    last = turn(TALK)
    grown = [*said(1, evict=True), {"role": "user", "content": "go on"}]
    assert pending(last, turn(grown)) is None


def test_while_edits_wait_markers_are_sent_as_they_are_now() -> None:
    """A cache marker that has moved forward must not stay in its old place."""
    marked = [TALK[0] | {"cache_control": {"type": "ephemeral"}}, *TALK[1:]]
    grown = [*TALK, {"role": "user", "content": "go on"}]
    held = pending(turn(marked), turn(grown, Plugin(SHORTEN)))
    assert held is not None
    assert held.messages == grown
    noted = [TALK[0] | {"leyline": {"tags": ["x"]}}, *TALK[1:]]
    for before, now in ((noted, noted), (TALK, noted), (noted, TALK)):
        held = pending(turn(before), turn([*now, grown[-1]], Plugin(SHORTEN)))
        assert held is not None
        assert held.messages == grown


def test_while_edits_wait_nothing_new_is_left_out() -> None:
    """A new message that a policy puts in front is sent all the same."""
    new = {"role": "system", "content": "a new rule"}
    grown = [*TALK, new, {"role": "user", "content": "go on"}]

    def front(messages: list[Message], context: Context) -> list[Message]:
        del context
        rules = [m for m in messages if m["role"] == "system"]
        return [*rules, *(m for m in messages if m["role"] != "system")]

    for trusted in (True, False):
        policy = Plugin(front, trusted=trusted)
        now = turn(grown, policy)
        held = pending(turn(TALK, policy), now)
        assert "a new rule" in str((held or now).messages)


def test_a_forget_in_what_a_policy_put_in_does_not_wait() -> None:
    """Its text may hold a secret as well."""
    tell = Plugin(lambda ms, _: [{"role": "user", "content": "hunter2"}, *ms], "tells")
    grown = [*TALK, {"role": "user", "content": "go on"}]
    redact = load_pipeline("redact:pattern=hunter2")
    assert pending(turn(TALK, tell), turn(grown, tell, *redact)) is None


# All of it together

FATES = ("edit", "copy", "drop", "leave", "move", "forget", "forget by drop", "verb", "pin")
FATE = st.tuples(st.sampled_from(FATES), st.integers(0, 5), st.booleans())
TEXTS = [f"text {number}" for number in range(6)]


def _fate(fate: str, name: str) -> Transform:
    def become(message: Message) -> list[Message]:
        made: dict[str, Callable[[], list[Message]]] = {
            "edit": lambda: [edit(message, stub="[e]")],
            "copy": lambda: [{**message, "content": "[c]"}],
            "drop": lambda: [drop(message)],
            "forget": lambda: [edit(message, content="[f]", mode="forget")],
            "forget by drop": lambda: [drop(message, mode="forget")],
            "verb": lambda: [forget(message)],
            "pin": lambda: [pin(message)],
        }
        return made[fate]() if fate in made else []

    def transform(messages: list[Message], context: Context) -> list[Message]:
        del context
        mine = [m for m in messages if m.get("name") == name]
        if fate == "move":
            return [*mine, *(m for m in messages if m not in mine)]
        return [e for m in messages for e in (become(m) if m.get("name") == name else [m])]

    return transform


@given(st.lists(FATE, max_size=5), st.sets(st.integers(0, 5)), st.sets(st.integers(0, 5)))
def test_what_is_to_be_forgotten_is_forgotten(
    fates: list[tuple[str, int, bool]], pinned: set[int], waiting: set[int]
) -> None:
    """Others may edit, move, drop or pin the message, and anything may wait."""
    client: list[Message] = [
        {"role": "user", "name": f"n{number}", "content": text}
        | ({"leyline": {"pin": True}} if number in pinned else {})
        for number, text in enumerate(TEXTS)
    ]
    client.append({"role": "user", "content": "the last"})
    policies = [
        Plugin(_fate(fate, f"n{number}"), f"{place}", trusted=trusted)
        for place, (fate, number, trusted) in enumerate(fates)
    ]
    prepared = run(*policies, client=client)
    assert prepared.faults == ()
    there = set(range(6))
    for fate, number, _ in fates:
        if number in there and fate in ("forget", "forget by drop", "verb"):
            assert number in prepared.forget_marks
            assert TEXTS[number] not in str(prepared.messages)
        if fate in ("drop", "leave", "forget by drop", "verb") and number not in pinned:
            there.discard(number)
        if fate == "pin":
            pinned = {*pinned, number} if number in there else pinned
    last = run(*(p for i, p in enumerate(policies) if i not in waiting), client=client)
    grown = [*client, {"role": "user", "content": "and on"}]
    now = run(*policies, client=grown)
    held = pending(last, now)
    if held is not None:
        assert "and on" in str(held.messages)
        places = [entry.client_index for entry in held.sent if entry.client_index is not None]
        gone = [item.client_index for item in held.dropped]
        assert sorted(places + gone) == list(range(len(grown)))
        assert not any(TEXTS[index] in str(held.messages) for index in held.forget_marks)
