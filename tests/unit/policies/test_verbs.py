"""The effects of messages' annotations."""

from __future__ import annotations

from typing import Any

import pytest

from leyline_policies import Context, Message
from leyline_policies.marks import mark_of
from leyline_policies.verbs import (
    Verbs,
    decay,
    evict,
    forget,
    pin,
    pinned,
    scopes_of,
    scratch,
    share,
)

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def _talk(answers: int, said: dict[str, Any] | None = None) -> list[Message]:
    """A note, a call with its result, and so many answers; the note carries what is said."""
    note: Message = {"role": "user", "content": "a note"}
    if said is not None:
        note["leyline"] = said
    messages = [note, {"role": "user", "content": "go"}]
    for number in range(answers):
        messages.append({"role": "assistant", "content": f"answer {number}"})
        messages.append({"role": "user", "content": "more"})
    return messages


def _run(messages: list[Message], context: Context | None = None) -> list[Message]:
    return Verbs().transform(messages, 0, context or Context(slot="verbs"))


@pytest.mark.parametrize(
    ("said", "answers", "goes"),
    [
        ({"evict": True}, 0, True),
        ({"forget": True}, 0, True),
        ({"scratch": True}, 0, False),
        ({"scratch": True}, 1, True),
        ({"decay": {"turns": 2}}, 1, False),
        ({"decay": {"turns": 2}}, 2, True),
        ({"pin": True}, 9, False),
        ({"tags": ["x"]}, 9, False),
        (None, 9, False),
    ],
)
def test_messages_go_when_they_should(said: Any, answers: int, goes: bool) -> None:
    """Now, at the end of their turn, or after some turns."""
    after = _run(_talk(answers, said))
    mark = mark_of(after[0])
    assert (mark is not None and mark.dropped) is goes
    assert len(after) == 2 + 2 * answers


def test_forgetting_alone_demands_a_forget() -> None:
    """All other verbs amortise."""
    for verb, mode in (("forget", "forget"), ("evict", "amortize")):
        mark = mark_of(_run(_talk(0, {verb: True}))[0])
        assert mark is not None
        assert (mark.mode, mark.cause) == (mode, verb)


def test_results_and_calls_leave_a_stub() -> None:
    """Pairs stay whole, and the stub says nothing more of itself."""
    messages: list[Message] = [
        {"role": "user", "content": "go"},
        evict({"role": "assistant", "content": "I call", "tool_calls": [CALL]}),
        forget({"role": "tool", "tool_call_id": "c", "content": "secret"}),
    ]
    after = _run(messages)
    assert [message["content"] for message in after] == ["go", "[evicted]", "[forgotten]"]
    assert after[1]["tool_calls"] == [CALL] and after[2]["tool_call_id"] == "c"
    assert not any("leyline" in message for message in after)


def test_the_last_message_of_the_user_never_goes() -> None:
    """It stays, whatever is said of it."""
    messages: list[Message] = [{"role": "user", "content": "go"}, evict({"role": "user"})]
    assert _run(messages) == messages


def test_seconds_count_from_when_a_message_was_first_seen() -> None:
    """Across turns, by what the session's state holds, which is no text."""
    message = decay({"role": "user", "content": "a note"}, seconds=10)
    state: dict[str, Any] = {}
    gone = []
    for elapsed in (100.0, 109.0, 110.0):
        context = Context(elapsed_s=elapsed, state=state, slot="verbs")
        after = _run([message, {"role": "user", "content": "go"}], context)
        mark = mark_of(after[0])
        gone.append(mark is not None and mark.dropped)
    assert gone == [False, False, True]
    assert "note" not in str(state)


def test_a_message_may_be_said_several_things_of() -> None:
    """The second verb keeps the first."""
    message = pin(scratch({"role": "user", "content": "x"}))
    assert message["leyline"] == {"scratch": True, "pin": True}
    assert pinned([message, {"role": "user", "content": "y"}]) == frozenset({0})


@pytest.mark.parametrize("terms", [{}, {"turns": 0}, {"seconds": -1.0}])
def test_a_decay_without_an_end_is_refused(terms: Any) -> None:
    """It would mean nothing."""
    with pytest.raises(ValueError, match="decay needs"):
        decay({"role": "user", "content": "x"}, **terms)


def test_scopes_are_names() -> None:
    """A policy may name one to share with; what is no name is refused."""
    message = share({"role": "user", "content": "x"}, "team/docs")
    assert scopes_of([message, {"role": "user", "content": "y"}]) == {"team/docs"}
    with pytest.raises(ValueError, match="no name"):
        share({"role": "user", "content": "x"}, "two words")
