"""The limits of a plan's copies, judged by a second opinion on who changed what.

The conversations name each message's author in the text itself, so the judge needs no diff: it
knows which characters a policy changed and which the caller did.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.character_turns import (
    ANYTHING,
    NOTHING,
    Rule,
    apply_callers,
    callers_edits,
    copies,
    first_change,
    numbered,
    plan_of,
    render,
    retained,
)

from leyline_engine.contract import (
    CopySegment,
    LineageRun,
    Mode,
    Outcome,
    Recompute,
    check_directives,
)
from leyline_proxy.edits.prepare import prepare
from leyline_proxy.model.messages import Message
from leyline_proxy.model.session import Departed, RetainedTurn
from leyline_proxy.model.undeclared import UndeclaredRules
from leyline_proxy.plan.naming import name_spans
from leyline_proxy.plan.synthesis import synthesize
from leyline_proxy.request.declared import DeclaredEdit

HIDDEN = "SECRET"


@given(numbered().flatmap(lambda ms: st.tuples(st.just(ms), callers_edits(len(ms)))), st.data())
def test_nothing_behind_a_callers_own_edit_is_copied(
    pair: tuple[list[Message], dict[int, str]], data: st.DataObject
) -> None:
    """A policy may be amortised before the first undeclared change, never after it."""
    messages, edits = pair
    target = data.draw(st.integers(0, len(messages) - 1))
    rule = Rule(f"word{target} ", "")
    source = retained(prepare(messages, [], [], 0))
    prepared = prepare(apply_callers(messages, edits), [rule], [], 1)
    plan = plan_of([source], prepared)
    # The judge: as the caller's edits alone would render, over a source that the rule had edited.
    before = render(rule.transform(messages, 0))
    limit = first_change(before, render(prepared.messages))
    assert all(segment.dest_end <= limit for segment in copies(plan))
    if edits and min(edits) <= target and edits.get(target) != "insert":
        assert plan.planned is not Outcome.SPLICED


@given(
    numbered().flatmap(lambda ms: st.tuples(st.just(ms), callers_edits(len(ms)))),
    st.sampled_from([NOTHING, ANYTHING]),
    st.sampled_from(["amortize", "forget"]),
    st.builds(Recompute, st.integers(0, 40), st.sampled_from([0, 0, 1, 3])),
    st.data(),
)
def test_plans_are_sound(
    pair: tuple[list[Message], dict[int, str]],
    rules: UndeclaredRules,
    mode: str,
    recompute: Recompute,
    data: st.DataObject,
) -> None:
    """Segments cover the prompt, copies are equal and out of a forget's reach, directives fit."""
    messages, edits = pair
    target = data.draw(st.integers(0, len(messages) - 1))
    spliced = data.draw(st.none() | st.integers(0, 300))
    runs = () if spliced is None else (LineageRun(spliced, "l"),)
    source = retained(prepare(messages, [], [], 0), output="said", lineage=runs)
    prepared = prepare(apply_callers(messages, edits), [Rule(f"word{target} ", "", mode)], [], 1)
    prompt = render(prepared.messages)
    plan = synthesize(
        [source],
        prepared,
        prompt,
        rules,
        names=name_spans("now", prepared, [source], Departed(), prompt),
        model_fingerprint="m",
        sink=0,
        recompute=recompute,
    )
    cursor = 0
    for segment in plan.segments:
        assert segment.dest == cursor < segment.dest_end
        cursor = segment.dest_end
        if isinstance(segment, CopySegment):
            kept = source.tokens[segment.start : segment.end]
            assert kept == prompt.tokens[segment.dest : cursor]
    assert cursor in (0, len(prompt.tokens))
    check_directives(plan.directives, len(source.tokens))
    secret = "".join(map(chr, source.tokens)).find(f"word{target} ")
    if mode == "forget" and not edits:
        assert plan.forgets
    if plan.forgets and "insert" not in edits.values():
        assert all(segment.end <= secret for segment in copies(plan))
        assert not runs or all(segment.end <= runs[0].start for segment in copies(plan))
        assert plan.lineage == ()


def agent(*results: str) -> list[Message]:
    """A conversation with tool results."""
    messages: list[Message] = [
        {"role": "system", "content": "a system prompt that is longer than the sink"},
        {"role": "user", "content": "the task that is to be done"},
    ]
    for turn, text in enumerate(results):
        call = {"id": f"c{turn}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{turn}", "content": text},
        ]
    return [*messages, {"role": "user", "content": "and what comes behind all that is this"}]


BEHIND = "and a long text behind it all that nobody ever changed"
LEAK = f"it is {HIDDEN} that is told"
CUT = Rule(LEAK, "[cut]", name="cut")
REDACT = Rule(HIDDEN, "[gone]", "forget", name="redact")


def hidden(messages: list[Message]) -> RetainedTurn:
    """A turn whose prompt is clean and whose KV has read the secret."""
    prepared = prepare(messages, [CUT], [], 1)
    return retained(prepared, "t1", lineage=(LineageRun(90, "l"),))


@pytest.mark.parametrize(
    "policies",
    [
        [Rule(HIDDEN, "[gone]", "forget"), Rule("it is [gone] that is told", "[cut]")],
        [CUT, REDACT],
        [REDACT, Rule("[gone]", "", drops=True)],
    ],
    ids=["redact-cut", "cut-redact", "redact-drop"],
)
def test_a_forget_in_a_pipeline_binds(policies: list[Any]) -> None:
    """The turn forgets, whatever other policies do to the message before or after."""
    messages = [m for m in agent("fine") if "tool_calls" not in m and m["role"] != "tool"]
    messages.insert(2, {"role": "assistant", "content": LEAK})
    for source in (retained(prepare(messages, [], [], 0)), hidden(messages)):
        plan = plan_of([source], prepare(messages, policies, [], 2))
        assert plan.forgets
        assert plan.lineage == ()


@pytest.mark.parametrize(
    "front",
    [
        0,
        1,
        9,
    ],
)
def test_insertions_in_front_hide_no_forget(front: int) -> None:
    """A newly redacted message binds at any place in the caller's new list."""
    messages = agent(LEAK, "fine")
    redact = [Rule(HIDDEN, "[gone]", "forget"), Rule("it is [gone] that is told", "[cut]")]
    notes = [{"role": "user", "content": f"note {number}"} for number in range(front)]
    moved = [messages[0], *notes, *messages[1:]]
    plan = plan_of([hidden(messages)], prepare(moved, redact, [], 2), ANYTHING)
    assert plan.forgets


def test_a_forget_is_not_anchored_at_a_neighbour() -> None:
    """A window that drops two messages and adds a note copies no reader of the secret between."""
    texts = ["the task of long ago", LEAK, "said after the secret was read", BEHIND]
    roles = ["assistant", "user", "user", "user"]
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    note = {"role": "user", "content": "a note on what was dropped"}
    source = retained(prepare(messages, [], [], 0))
    now = [note, messages[1], messages[3]]
    plan = plan_of([source], prepare(now, [REDACT], [], 1), ANYTHING)
    secret = "".join(map(chr, source.tokens)).find(HIDDEN)
    assert plan.forgets
    assert copies(plan) and all(segment.end <= secret for segment in copies(plan))
    amortized = plan_of([source], prepare(now, [Rule(HIDDEN, "[gone]")], [], 1), ANYTHING)
    assert any(segment.start > secret for segment in copies(amortized)), "else nothing was at stake"


def test_a_forget_binds_beside_an_insertion() -> None:
    """A note of the same role before the redacted message doesn't take its place."""
    messages = [{"role": "user", "content": LEAK}, {"role": "user", "content": "and so on"}]
    note = {"role": "user", "content": "a note that comes first"}
    source = retained(prepare(messages, [], [], 0))
    assert plan_of([source], prepare([note, *messages], [REDACT], [], 1)).forgets


def test_dropping_the_last_messages_forgets_them() -> None:
    """A forget binds also where the new prompt is a beginning of the old one."""
    messages = agent(LEAK)[:-1]
    edits = [DeclaredEdit(message=index, drop=True, mode=Mode.FORGET) for index in (2, 3)]
    prepared = prepare(messages, [], edits, 1)
    assert not prepared.faults
    assert plan_of([retained(prepare(messages, [], [], 0))], prepared).forgets


def test_what_is_dropped_already_can_be_forgotten() -> None:
    """A call that a policy dropped turns ago may be declared forgotten."""
    messages = agent(LEAK, "fine")

    class Drop:
        name, mode = "drop", "amortize"

        def transform(self, given: list[Message], turn_idx: int) -> list[Message]:
            return [*given[:2], *given[4:]] if len(given) == len(messages) else given

    source = retained(prepare(messages, [Drop()], [], 1), lineage=(LineageRun(90, "l"),))
    edits = [DeclaredEdit(message=index, drop=True, mode=Mode.FORGET) for index in (2, 3)]
    plan = plan_of([source], prepare(messages, [Drop()], edits, 2))
    assert plan.forgets


def test_a_redacted_answer_is_forgotten_behind_a_drop() -> None:
    """The model's text is forgotten also when this turn sends fewer messages before it."""
    messages = agent("fine")
    source = retained(prepare(messages, [], [], 0), output=f"{LEAK}</>")
    answered = [
        *messages,
        {"role": "assistant", "content": LEAK},
        {"role": "user", "content": "so"},
    ]
    shorter = Rule("the task", "", drops=False)
    assert plan_of([source], prepare(answered, [shorter, REDACT], [], 1)).forgets

    class Drop:
        name, mode = "drop", "amortize"

        def transform(self, given: list[Message], turn_idx: int) -> list[Message]:
            return [*given[:2], *given[4:]]

    assert plan_of([source], prepare(answered, [Drop(), REDACT], [], 1)).forgets


def test_every_retained_turn_that_holds_the_secret_is_named() -> None:
    """A forget reaches a branch of turns ago, not only the turn that is drawn on."""
    messages = agent(LEAK, "fine")
    branch = agent(LEAK, "another way", "and on")
    sources = [
        retained(prepare(list_, [], [], 0), f"t{index}")
        for index, list_ in enumerate((messages, branch, messages[:4]))
    ]
    plan = plan_of(sources, prepare(messages, [REDACT], [], 3))
    forgotten = {plan.sources[d.source].turn for d in plan.directives if d.mode is Mode.FORGET}
    assert forgotten == {"t0", "t1", "t2"}
