"""A prompt's tokens in reach, by the comparison with retained turns."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.sessions import RULES, after_turn, blank, history, pipeline, render, sessions

from leyline_engine.contract import CopySegment, Outcome, TokenCounts
from leyline_proxy.edits.prepare import prepare
from leyline_proxy.model.messages import Message
from leyline_proxy.model.session import Session
from leyline_proxy.model.vocabulary import CAUSES
from leyline_proxy.plan.busts import settle
from leyline_proxy.plan.naming import name_spans
from leyline_proxy.plan.reach import Reach, reach_by_messages
from leyline_proxy.plan.synthesis import TurnPlan, synthesize

SPECS = [
    "keep_all",
    "truncate_older_than:n=1,max_chars=20",
    "redact:pattern='sk-[a-z0-9]+'",
]


def plan_of(session: Session, messages: list[Message], spec: str = "keep_all") -> TurnPlan:
    """The plan of the session's next turn."""
    prepared = prepare(messages, pipeline(spec), (), session.next_index)
    rendered = render(prepared.messages)
    names = name_spans("next", prepared, session.turns, session.departed, rendered)
    return synthesize(
        session.turns, prepared, rendered, RULES, names=names, model_fingerprint="m", sink=0
    )


@settings(max_examples=examples(30))
@given(sessions(SPECS), st.sampled_from(SPECS), st.data())
def test_what_is_in_reach_stands_in_a_retained_turn(
    session: Session, spec: str, data: st.DataObject
) -> None:
    """Stretches are disjoint and in order, each is in one retained turn token by token, and edits
    only add up from left to right."""
    messages = list(session.turns[-1].prepared.client) if session.turns else history(1)
    place = data.draw(st.integers(0, len(messages) - 1))
    if data.draw(st.booleans()):
        messages[place] = {**messages[place], "content": "something else, said by the caller"}
    messages.append({"role": "user", "content": "Go on."})
    prompt = render(prepare(messages, pipeline(spec), (), session.next_index).messages).tokens
    reach = plan_of(session, messages, spec).reach
    assert reach.known == bool(session.turns)
    sources = [turn.tokens.tobytes() for turn in session.turns]
    at, first, hard = 0, "", ""
    for stretch in reach.stretches:
        assert at <= stretch.start < stretch.end <= len(prompt)
        assert {stretch.first, stretch.hard} <= {*CAUSES, ""}
        assert first in ("", stretch.first) and hard in ("", stretch.hard)
        at, first, hard = stretch.end, stretch.first, stretch.hard
        assert any(prompt[stretch.start : stretch.end].tobytes() in held for held in sources)


@settings(max_examples=examples(30))
@given(sessions(SPECS), st.sampled_from(SPECS))
def test_an_engine_that_does_as_planned_loses_nothing_unplanned(
    session: Session, spec: str
) -> None:
    """If the head is cached and all copies are made, nothing is missing, and no edit that was
    spliced over is to blame."""
    messages = list(session.turns[-1].prepared.client) if session.turns else history(1)
    messages.append({"role": "user", "content": "Go on."})
    plan = plan_of(session, messages, spec)
    size = len(render(prepare(messages, pipeline(spec), (), session.next_index).messages).tokens)
    copies = [(s.dest, s.dest_end) for s in plan.segments if isinstance(s, CopySegment)]
    head = max([s.end for s in plan.reach.stretches if not s.first], default=0)
    head = min(head, size - 1)
    spliced = sum(max(0, end - max(start, head)) for start, end in copies)
    tokens = TokenCounts(size, head, spliced, prefilled=size - head - spliced)
    found = settle(plan.reach, tokens, copies=copies, reconciled=not plan.forgets)
    assert found.missing == 0
    assert "engine" not in found.busts
    if plan.planned is Outcome.UNEDITED:
        assert found.busts == {}


def test_what_was_generated_last_is_out_of_reach() -> None:
    """There is no KV of the token that nothing has read yet."""
    session = after_turn(blank("s"), history(2), answer="the answer")
    turn = session.turns[-1]
    longer = plan_of(session, [*history(2), {"role": "assistant", "content": "the answer"}])
    assert max(stretch.end for stretch in longer.reach.stretches) <= len(turn.tokens) - 1


def test_messages_stand_for_tokens_where_those_are_unknown() -> None:
    """Without edits all of the last prompt is in reach, after an edit the share of messages that
    were kept, and nothing where the tail was taken off."""
    last = after_turn(blank("s"), history(6)).turns[-1]
    assert last.receipt is not None
    held, context = last.receipt.tokens.prompt, last.rendered.context

    def reach(messages: list[Message], first: str = "", also: str = context) -> Reach:
        return reach_by_messages(last, prepare(messages, (), (), 1), first, also)

    assert [s[:2] for s in reach(history(7)).stretches] == [(0, held)]
    middle = history(7)
    middle[7] = {**middle[7], "content": "gone"}
    (behind,) = reach(middle, "undeclared").stretches
    assert behind.first == "undeclared" and 0.3 * held < behind.end < 0.7 * held
    assert reach(history(4), "undeclared").stretches == ()
    inserted = [*history(1)[:2], {"role": "user", "content": "And now?"}, *history(7)[2:]]
    (cut,) = reach(inserted).stretches
    assert cut.first == "undeclared" and cut.end > 0.8 * held
    (tools,) = reach(history(7), also="other tools").stretches
    assert tools.first == "tools" and tools.end == held
