"""A turn's demands to forget: bound wherever the text was read, asked for once, reported once."""

from __future__ import annotations

import pytest
from support.character_turns import ANYTHING, Rule, copies, plan_of, render, retained

from leyline_engine.contract import Mode
from leyline_proxy.edits.prepare import prepare
from leyline_proxy.model.messages import Message
from leyline_proxy.model.session import Departed, Session
from leyline_proxy.plan.forgetting import spans_to_forget
from leyline_proxy.plan.naming import name_spans
from leyline_proxy.request.declared import DeclaredEdit

HIDDEN = "SECRET"
REDACT = Rule(HIDDEN, "[gone]", "forget", name="redact")
BASE: list[Message] = [
    {"role": "system", "content": "a system prompt that is longer than the sink is wide"},
    {"role": "user", "content": "the task that is to be done, told at some length"},
]
LEAK: Message = {"role": "assistant", "content": f"the key is {HIDDEN} and there is no other one"}
BEHIND: Message = {"role": "user", "content": "what comes behind it has read it, all of it"}
TOLD: Message = {"role": "user", "content": "in other words, of which it has next to none"}
NEW: Message = {"role": "user", "content": f"and another {HIDDEN} that nobody has read so far"}


def test_a_message_held_by_several_turns_is_told_once() -> None:
    """The account has one record of it; each turn that holds it is named in a directive."""
    lists = [[*BASE, LEAK], [*BASE, LEAK, BEHIND], [*BASE, LEAK, BEHIND, BASE[1]]]
    sources = [retained(prepare(each, [], [], 0), f"t{at}") for at, each in enumerate(lists)]
    plan = plan_of(sources, prepare(lists[-1], [REDACT], [], 3))
    assert [(edit.message, edit.cause, edit.mode) for edit in plan.edits] == [
        (2, "policy:redact", "forget")
    ]
    named = {plan.sources[d.source].turn for d in plan.directives if d.mode is Mode.FORGET}
    assert named == {"t0", "t1", "t2"}


def test_a_policys_drop_is_told_once() -> None:
    """A dropped message that is to be forgotten is one edit, of the message that is still there."""
    messages = [*BASE, LEAK, BEHIND]
    edit = DeclaredEdit(message=2, drop=True, mode=Mode.FORGET)
    plan = plan_of([retained(prepare(messages, [], [], 0))], prepare(messages, [], [edit], 1))
    assert [(edit.message, edit.cause, edit.mode) for edit in plan.edits] == [
        (2, "declared", "forget")
    ]


@pytest.mark.parametrize("verb", ["drop", "replacement", "evict"])
def test_what_a_caller_takes_out_to_amortize_hides_nothing_from_a_policy(verb: str) -> None:
    """The policy looks at the client's own text, and what it finds there is to be forgotten."""
    source = retained(prepare([*BASE, LEAK, BEHIND], [], [], 0))
    leak, edits = LEAK, [DeclaredEdit(message=2, drop=True)]
    if verb == "replacement":
        edits = [DeclaredEdit(message=2, replacement="cut")]
    elif verb == "evict":
        leak, edits = {**LEAK, "leyline": {"evict": True}}, []
    prepared = prepare([*BASE, leak, BEHIND], [REDACT], edits, 1)
    assert HIDDEN not in str(prepared.messages)
    assert prepared.forget_marks.keys() == {2}
    assert plan_of([source], prepared).forgets


def test_a_new_message_binds_no_source() -> None:
    """Redacting what this turn brings is no forget, also where an answer comes with it."""
    source = retained(prepare(BASE, [], [], 0), output="an answer of the model</>")
    answer: Message = {"role": "assistant", "content": "an answer of the model"}
    plan = plan_of([source], prepare([*BASE, answer, NEW], [REDACT], [], 1))
    assert not plan.forgets
    assert plan.reusable_tokens >= len(source.rendered.tokens)


@pytest.mark.parametrize("departed", [False, True], ids=["retained", "departed"])
@pytest.mark.parametrize(
    ("first", "second", "now", "wanted"),
    [
        ([*BASE, LEAK], [*BASE, TOLD, BEHIND], [BASE[0], LEAK, BASE[1], BEHIND], {"t0.2", "t1.2"}),
        (
            [BASE[0], LEAK, BEHIND, BASE[1]],
            [BASE[0], TOLD, BASE[1]],
            [*BASE, LEAK, BEHIND],
            {"t0.1", "t1.1"},
        ),
    ],
    ids=["it came back", "it kept its name"],
)
def test_what_was_once_made_of_a_message_is_forgotten_with_it(
    first: list[Message],
    second: list[Message],
    now: list[Message],
    wanted: set[str],
    departed: bool,
) -> None:
    """A text that the caller had put in its place for a turn may reveal it, though this list has
    the message back elsewhere, and whether or not that turn is still retained."""
    holding = retained(prepare(first, [], [], 0))
    telling = retained(prepare(second, [], [], 1), "t1", before=[holding])
    gone = Departed().after([telling], [holding]) if departed else Departed()
    assert gone is not None
    turns = (holding,) if departed else (holding, telling)
    session = Session("s", "t", "", turns, (), 2, 0.0, departed=gone)
    prepared = prepare(now, [REDACT], [], 2)
    names = name_spans("t2", prepared, turns, gone, render(prepared.messages))
    assert wanted <= set(spans_to_forget("t2", prepared, names, session, named=True))


def test_moving_a_message_hides_no_demand() -> None:
    """A message that the caller moved to the end and a policy redacts was read in its old place."""
    messages = [*BASE, LEAK, BEHIND, {"role": "user", "content": "and the last one, unchanged"}]
    moved = [*BASE, *messages[3:], LEAK]
    source = retained(prepare(messages, [], [], 0))
    plan = plan_of([source], prepare(moved, [REDACT], [], 1), ANYTHING)
    secret = "".join(map(chr, source.tokens)).find(LEAK["content"])
    assert plan.forgets
    assert all(segment.end <= secret for segment in copies(plan))
