"""Answers to policies' questions, as quotes and as sources."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from support.sessions import after_turn, blank, history, render

from leyline_proxy.edits.prepare import prepare
from leyline_proxy.model.messages import Message
from leyline_proxy.model.session import MAX_QUESTIONS, RetainedTurn, Session, TurnSummary
from leyline_proxy.plan.naming import name_spans
from leyline_proxy.plan.quotes import find_quotes, is_vouched

SUMMARY = "".join(random.Random(4).choices("abcdefgh ", k=300))


def asked_after(session: Session) -> RetainedTurn:
    """The question of a policy about the session's last list."""
    last = session.turns[-1]
    return replace(last, turn="question", output_ids=(*map(ord, SUMMARY),), for_policy=True)


def kept(session: Session, turn: RetainedTurn | None, keep: int) -> Session:
    """The session after one more turn."""
    summary = TurnSummary(session.next_index, "", 0.0, session.history[-1].planned, None, (), None)
    return session.retain(turn, summary, keep=keep, now=1.0)


def worked() -> Session:
    """A session of four turns."""
    session = blank("s")
    for turns in range(1, 5):
        session = after_turn(session, history(turns))
    return session


def with_summary() -> list[Message]:
    """A list that has the summary in place of its middle."""
    messages = history(6)
    return [messages[0], {"role": "user", "content": f"So far:\n{SUMMARY}"}, *messages[-2:]]


def test_the_answer_to_a_policy_is_found_and_shows_nothing_of_the_caller() -> None:
    """It is a source where it stands, and no sign that the caller compacted its history."""
    session = worked()
    prepared = prepare(with_summary(), (), (), 5)
    prompt = render(prepared.messages)
    turns = (*session.turns, asked_after(session))
    found = find_quotes(turns, prompt, prepared.sent_fingerprints)
    (run,) = found.of_turn[-1]
    assert run.length >= len(SUMMARY)
    assert found.end == run.dest_end and not found and not found.messages


def test_it_is_moved_only_where_the_caller_shows_what_it_has_read() -> None:
    """All of the list that it followed, with the same tools."""
    session = worked()
    question, shown = asked_after(session), prepare(history(6), (), (), 5)
    prompt = render(shown.messages)
    assert is_vouched(question, shown, prompt)
    assert not is_vouched(question, shown, replace(prompt, context="other tools"))
    less = prepare(history(6)[1:], (), (), 5)
    assert not is_vouched(question, less, prompt)
    assert is_vouched(session.turns[-1], less, prompt), "a caller's own quotes show enough"


def test_it_is_nobodys_message() -> None:
    """No answer of the client's list gets its name, not even as a possible one."""
    session = worked()
    turns = (*session.turns, asked_after(session))
    messages = [*history(4), {"role": "assistant", "content": SUMMARY}]
    prepared = prepare(messages, (), (), 5)
    names = name_spans("t5", prepared, turns, session.departed, render(prepared.messages))
    assert not any("question" in name for each in names.client for name in each.all)
    gone = session.departed.after((asked_after(session),), ())
    assert gone is not None and gone.outputs == ()


@pytest.mark.parametrize("keep", [1, 2, 4])
def test_questions_stay_beside_the_clients_turns(keep: int) -> None:
    """They push none out, the newest two stay, and each goes one turn after those before it."""
    session = worked()
    own = [turn.turn for turn in session.turns][-keep:]
    questions = [replace(asked_after(session), turn=f"q{number}") for number in range(3)]
    for question in questions:
        session = kept(session, question, keep)
    names = [turn.turn for turn in session.turns]
    assert names == [*own, *(each.turn for each in questions[-MAX_QUESTIONS:])]
    assert session.last is not None and session.last.turn == own[-1]
    for turns in range(5, 5 + keep):
        session = kept(session, after_turn(session, history(turns)).turns[-1], keep)
        assert [turn.turn for turn in session.turns if turn.for_policy] == ["q1", "q2"]
    session = kept(session, after_turn(session, history(5 + keep)).turns[-1], keep)
    assert not any(turn.for_policy for turn in session.turns)


def test_a_forget_of_everything_takes_questions_with_it() -> None:
    """Their tokens are prompt text, whichever turns are left beside them."""
    session = worked()
    question = asked_after(session)
    for turns in ((*session.turns, question), (question,)):
        left = replace(session, turns=turns).without_tokens()
        assert not any(turn.for_policy for turn in left.turns)
