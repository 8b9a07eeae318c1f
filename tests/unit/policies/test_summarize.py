"""Summaries that take the place of what they cover."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from leyline_policies import Message, SpecError, load_pipeline
from leyline_policies.builtin.summarize import HEADING, TASK, Summarize
from leyline_policies.context import Completion, Context, apply

POLICY = Summarize(trigger_tokens=100, keep_messages=4, summarized_tokens=60)


def talk(steps: int, task: str = "a task") -> list[Message]:
    """An agent that has called a tool so often."""
    messages: list[Message] = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": task},
    ]
    for number in range(steps):
        function = {"name": "ls", "arguments": f'{{"path": "{number}"}}'}
        call = {"id": f"c{number}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append(
            {"role": "tool", "tool_call_id": f"c{number}", "content": f"{number} " * 40}
        )
    return messages


class Session:
    """Turns of one session, with a model that answers on command."""

    def __init__(self, policy: Summarize = POLICY) -> None:
        self.policy = policy
        self.state: dict[str, Any] = {}
        self.completions: dict[str, str] = {}
        self.wanted: list[Completion] = []

    def send(self, messages: list[Message], **facts: Any) -> list[Message]:
        """One turn."""
        context = Context(
            state=self.state, completions=self.completions, slot="0.summarize", **facts
        )
        sent = apply(self.policy, messages, 0, context)
        self.wanted = context.wanted
        self.completions = {k: v for k, v in self.completions.items() if k in context.used}
        return sent

    def answer(self, text: str) -> None:
        """The model has written."""
        self.completions[self.wanted[0].key] = text


def test_nobody_waits_for_a_summary() -> None:
    """The turn that asks and those after it are sent in full until the answer has come."""
    session = Session()
    assert session.send(talk(2)) == talk(2)
    assert session.wanted == []
    assert session.send(talk(6)) == talk(6)
    asked = session.wanted[0]
    assert session.send(talk(6)) == talk(6)
    assert session.wanted == [asked]


def test_the_summary_stands_for_what_it_tells_of_from_then_on() -> None:
    """It is the same text in the same place on every later turn; newer text follows in full."""
    session = Session()
    session.send(talk(6))
    session.answer("looked at six folders")
    first = session.send(talk(6))
    assert [m["role"] for m in first] == ["system", "user", *("assistant", "tool") * 2]
    assert first[1]["content"] == f"a task\n\n{HEADING}looked at six folders"
    assert first[2:] == talk(6)[-4:]
    later = session.send(talk(7))
    assert later == [*first, *talk(7)[-2:]]


def test_the_conversation_may_grow_while_the_model_writes() -> None:
    """The question stays the same, and its answer takes the place of the part that it covers."""
    session = Session()
    session.send(talk(6))
    asked = session.wanted[0].key
    for steps in (7, 8):
        assert session.send(talk(steps)) == talk(steps)
        assert [each.key for each in session.wanted] == [asked]
    session.answer("looked at four folders")
    sent = session.send(talk(9))
    assert sent[1]["content"].endswith("looked at four folders")
    assert sent[2:] == talk(9)[-10:]


def test_a_question_that_nobody_answers_is_given_up() -> None:
    """After many turns a newer part is asked about."""
    session = Session()
    session.send(talk(6), turn=1)
    first = session.wanted[0].key
    session.send(talk(8), turn=20)
    assert session.wanted[0].key == first
    session.send(talk(8), turn=21)
    assert session.wanted[0].key != first


def test_the_next_summary_takes_in_the_last_one() -> None:
    """The model is shown it, and the conversation after it."""
    session = Session()
    session.send(talk(6))
    session.answer("the first summary")
    session.send(talk(7))
    session.send(talk(12))
    assert len(session.wanted) == 1
    session.answer("the second summary")
    sent = session.send(talk(12))
    assert "second summary" in sent[1]["content"] and "first summary" not in sent[1]["content"]
    assert sent[2:] == talk(12)[-4:]


def test_a_changed_history_throws_the_summary_away() -> None:
    """Text in it that was redacted or taken back must not live on in its summary."""
    session = Session()
    session.send(talk(6))
    session.answer("looked")
    session.send(talk(6))
    changed = talk(6, task="another task")
    assert session.send(changed) == changed
    assert session.wanted and not session.completions


@pytest.mark.parametrize("model", ["", "own"])
def test_the_sessions_model_is_asked_after_the_conversation(model: str) -> None:
    """It has all of it before the question, which is one message."""
    session = Session(replace(POLICY, model=model))
    session.send(talk(6), model="own", policy="summarize")
    (question,) = session.wanted
    assert question.continues and question.policy == "summarize"
    assert question.messages == ({"role": "user", "content": TASK},)
    assert question.max_tokens == 800 and question.model == ""


def test_another_model_is_shown_the_newest_part_that_fits() -> None:
    """Whole messages, the oldest left out."""
    session = Session(replace(POLICY, model="other"))
    session.send(talk(6), model="own")
    (question,) = session.wanted
    shown = str(question.messages[1]["content"])
    assert "3 3 3" in shown and "0 0 0" not in shown
    assert question.max_tokens == 800 and question.model == "other" and not question.continues


def test_the_window_triggers_too() -> None:
    """It triggers at a share of it; without a known window, not at all."""
    session = Session(Summarize(trigger_tokens=None, trigger_fraction=0.5, keep_messages=4))
    session.send(talk(6))
    assert session.wanted == []
    session.send(talk(6), window=200)
    assert len(session.wanted) == 1


@pytest.mark.parametrize(
    "settings",
    ["trigger_tokens=0", "trigger_tokens=none", "trigger_fraction=2", "keep_messages=0"],
)
def test_settings_that_mean_nothing_are_refused(settings: str) -> None:
    """The error names the key."""
    with pytest.raises(SpecError, match=settings.partition("=")[0]):
        load_pipeline(f"summarize:{settings}")
