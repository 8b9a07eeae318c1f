"""fallback: the first policy that works."""

from __future__ import annotations

from typing import Any

import pytest
from talking import Talk
from tool_talks import talk

from leyline_policies import Message, Policy, SpecError, load_pipeline
from leyline_policies.builtin.fallback import Fallback
from leyline_policies.builtin.sliding_window import SlidingWindow
from leyline_policies.builtin.summarize import Summarize

LONG = talk(*[("bash", str(i)) for i in range(8)])
"""18 messages, of ten tokens each."""
SUMMARY = Summarize(trigger_tokens=60, keep_messages=2)
CUT = SlidingWindow(max_messages=5, keep_messages=4)


class Broken:
    """A policy that raises, after it has left a state and a note."""

    name, mode, trusted = "broken", "amortize", True

    def transform(self, messages: list[Message], turn_idx: int, context: Any) -> list[Message]:
        """Raise."""
        context.state["left"] = 1
        context.note("tried")
        raise RuntimeError("no")


def session(*policies: Any, **settings: Any) -> Talk:
    """Turns with the policy."""
    return Talk(Fallback(policies, **settings))


def test_a_summary_is_waited_for_and_a_cut_takes_its_place() -> None:
    """All is sent until the patience is over; then the cut is, on every turn alike."""
    turns = session(SUMMARY, CUT, max_tokens=80, patience_turns=2)
    assert turns.send(LONG) == LONG and len(turns.wanted) == 1
    assert turns.send(LONG) == LONG
    cut = turns.send(LONG)
    assert len(cut) == 6 and len(turns.wanted) == 1
    assert [(note.kind, note.values) for note in turns.notes] == [("fallback", {"passed_over": 1})]
    assert turns.send(LONG) == cut


def test_an_answer_that_comes_late_is_used_all_the_same() -> None:
    """The summary replaces the cut, and the patience begins again when it fits no more."""
    turns = session(SUMMARY, CUT, max_tokens=80, patience_turns=1)
    turns.send(LONG)
    assert len(turns.send(LONG)) == 6
    turns.answer("they looked")
    told = turns.send(LONG)
    assert "they looked" in told[1]["content"] and turns.state.get("over") is None
    longer = [*LONG, *talk(*[("bash", f"n{i}") for i in range(4)])[2:]]
    assert "they looked" in turns.send(longer)[1]["content"]


def test_a_policy_that_raises_is_passed_over_at_once() -> None:
    """It leaves neither state nor notes, and works again as soon as it can."""
    turns = session(Broken(), CUT, max_tokens=80)
    assert len(turns.send(LONG)) == 6
    assert "left" not in str(turns.state)
    assert [note.kind for note in turns.notes] == ["fallback"]


def test_the_last_one_is_sent_even_if_it_leaves_too_much() -> None:
    """Nothing is worse than too long a prompt but none."""
    turns = session(SUMMARY, CUT, max_tokens=20, patience_turns=0)
    assert len(turns.send(LONG)) == 6
    mixed = session(CUT, Broken(), max_tokens=20, patience_turns=0)
    assert len(mixed.send(LONG)) == 6


def test_a_failure_of_all_is_a_failure() -> None:
    """It is raised, as that of any policy."""
    with pytest.raises(RuntimeError, match="no"):
        session(Broken(), Broken()).send(LONG)


def test_without_a_limit_only_failures_count() -> None:
    """All that the first leaves is sent, unless a share of the window is the limit."""
    assert session(SUMMARY, CUT, patience_turns=0).send(LONG) == LONG
    limited = session(SUMMARY, CUT, patience_turns=0, max_fraction=0.1)
    assert limited.send(LONG) == LONG
    assert len(limited.send(LONG, window=900)) == 6


def test_a_policy_that_forgets_has_no_fallback() -> None:
    """Its replacement wouldn't keep its promise; other settings are checked as well."""
    (redact,) = load_pipeline("redact:pattern=x")
    policies: tuple[Policy, ...] = (redact,)
    with pytest.raises(ValueError, match="redact forgets"):
        Fallback(policies)
    for settings, words in {
        "policies=[]": "names no policy",
        "policies=[prune],max_tokens=0": "max_tokens=0",
        "policies=[prune],max_tokens=1,max_fraction=0.1": "both given",
        "policies=[prune],patience_turns=-1": "patience_turns=-1",
    }.items():
        with pytest.raises(SpecError, match=words):
            load_pipeline(f"fallback:{settings}")


def test_it_is_trusted_if_all_inside_are() -> None:
    """A policy of somebody else's keeps its limits."""

    def own(messages: list[Message], turn_idx: int) -> list[Message]:
        return messages

    from leyline_policies import FunctionPolicy

    assert Fallback((SUMMARY, CUT)).trusted
    assert not Fallback((SUMMARY, FunctionPolicy("own", "amortize", own))).trusted
