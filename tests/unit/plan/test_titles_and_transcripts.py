"""Plans of an agent whose session also holds a request for a title, and transcripts of it."""

from __future__ import annotations

from dataclasses import replace

import msgspec
from support.character_turns import ANYTHING, NOTHING, plan_of, render, retained, turn_of
from support.sessions import after_turn, blank, history

from leyline_engine.contract import CopySegment, Outcome
from leyline_proxy.edits.prepare import prepare
from leyline_proxy.model.messages import Message
from leyline_proxy.model.sentences import sentences_of
from leyline_proxy.model.session import RetainedTurn
from leyline_proxy.model.undeclared import UndeclaredRules
from leyline_proxy.plan.plan_input import PlanInput
from leyline_proxy.request.parse import parse_chat
from leyline_proxy.settings import Settings
from leyline_proxy.tenants import build_directory
from leyline_proxy.upstream.handshake import UpstreamStatus

LONG = "It was a long way, and the agent went it to its end, step by step, without a rest. " * 3
SUMMARY = "The agent read the files, repaired the second, ran all tests and found them green. " * 3
TASK: Message = {"role": "user", "content": LONG}
TITLE: list[Message] = [{"role": "system", "content": "You give titles."}, TASK]
WORK: list[Message] = [
    {"role": "system", "content": "You are an agent, and you work."},
    TASK,
    {"role": "assistant", "content": "I am done with it."},
    {"role": "user", "content": "And now?"},
]
AFTER: list[Message] = [
    WORK[0],
    {"role": "user", "content": "What was done?"},
    {"role": "assistant", "content": SUMMARY},
    {"role": "user", "content": "Go on."},
]
OPENING = replace(ANYTHING, trust="opening")
COMPACTION = UndeclaredRules(compaction="amortize", trust="opening")


def title_turn() -> RetainedTurn:
    """A request for a title, with the task and without tools."""
    turn = turn_of(TITLE)
    return replace(turn, rendered=replace(turn.rendered, context="no tools"))


def work_turn() -> RetainedTurn:
    """The agent's."""
    return replace(turn_of(WORK, name="t1"), offers_tools=True)


def transcript_turn() -> RetainedTurn:
    """A transcript of the agent's turn, and its summary."""
    told = "\n".join(str(message["content"]) for message in WORK[1:])
    prompt: list[Message] = [{"role": "user", "content": f"Summarise:\n{told}"}]
    turn = retained(prepare(prompt, (), (), 0), "t2", SUMMARY)
    context = replace(turn.rendered, context="no tools")
    return replace(turn, rendered=context, retells=True, sentences=sentences_of(SUMMARY))


def test_an_agent_is_compared_with_its_own_turns() -> None:
    """And with the summary of a transcript; a transcript is compared with nothing."""
    title, work, told = title_turn(), work_turn(), transcript_turn()
    session = replace(blank("s"), turns=(title, work, told))
    tenant = build_directory(Settings()).authenticate({})
    tool = {"type": "function", "function": {"name": "read"}}
    plain, agent = (
        parse_chat(msgspec.json.encode({"model": "m", "messages": WORK, **more}), {}, tenant)
        for more in ({}, {"tools": [tool]})
    )
    given = PlanInput("now", agent, (), OPENING, session, UpstreamStatus(), 3)
    assert given.comparable == (work, told) and given.last is work
    assert replace(given, retells=True).comparable == ()
    for other in (replace(given, request=plain), replace(given, rules=ANYTHING)):
        assert other.comparable == session.turns


def test_a_title_lends_nothing_but_its_exact_prefix() -> None:
    """The agent's list has its task, but other tools: the title's KV isn't its own."""
    plan = plan_of([title_turn()], prepare(WORK, (), (), 0), OPENING)
    assert plan.planned is not Outcome.SPLICED
    same = turn_of(TITLE)
    assert plan_of([same], prepare(WORK, (), (), 0), OPENING).planned is Outcome.SPLICED


def test_a_transcript_lends_its_summary_alone() -> None:
    """The rest of it is nobody's prompt."""
    turns = [title_turn(), work_turn(), transcript_turn()]
    prepared = prepare(AFTER, (), (), 0)
    plan = plan_of(turns, prepared, COMPACTION)
    assert plan.planned is Outcome.SPLICED
    start = len(turns[2].rendered.tokens)
    for each in plan.segments:
        if isinstance(each, CopySegment):
            source = plan.sources[each.source].turn
            assert source in {"t1", "t2"}
            assert source == "t1" or each.start >= start
    copied = sum(s.length for s in plan.segments if isinstance(s, CopySegment))
    assert copied >= len(SUMMARY.strip())
    assert plan_of(turns, prepared, NOTHING).planned is not Outcome.SPLICED
    assert plan_of(turns[:2], prepared, COMPACTION).planned is not Outcome.SPLICED
    assert len(render(AFTER).tokens) > copied


def test_a_list_is_compared_with_no_transcript() -> None:
    """Even one under the agent's own instructions accounts for none of the list's changes."""
    told = "\n".join(str(message["content"]) for message in WORK[1:])
    prompt: list[Message] = [WORK[0], {"role": "user", "content": f"What was done?\n{told}"}]
    turn = retained(prepare(prompt, (), (), 0), "t2", SUMMARY)
    turn = replace(turn, retells=True, sentences=sentences_of(SUMMARY))
    plan = plan_of([work_turn(), turn], prepare(AFTER, (), (), 0), COMPACTION)
    alone = plan_of([work_turn(), transcript_turn()], prepare(AFTER, (), (), 0), COMPACTION)
    assert plan.planned is Outcome.SPLICED and plan.edits == alone.edits
    assert [source.turn for source in plan.sources] == ["t1", "t2"]


def test_turns_apart_take_no_place_of_the_conversations() -> None:
    """The session's last turn is the agent's, and as many as before are kept."""
    session = blank("s-1")
    for count in range(1, 4):
        session = after_turn(session, history(count))
    apart = replace(transcript_turn(), index=3)
    summary = replace(session.history[-1], index=3)
    kept = session.retain(apart, summary, keep=3, now=0.0)
    assert kept.turns == (*session.turns[-3:], apart)
    assert kept.last is session.turns[-1]
