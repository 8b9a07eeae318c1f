"""Token diffs and plans over a renderer with one token per character."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from support.character_turns import ANYTHING, NOTHING, Rule, plan_of, render, turn_of

from leyline_engine.contract import (
    ATTENTION_SINK,
    CopySegment,
    LineageRun,
    Mode,
    Outcome,
    apply_directives,
)
from leyline_proxy.edits.prepare import prepare
from leyline_proxy.model.diff import diff_messages
from leyline_proxy.model.messages import Message
from leyline_proxy.model.prepared import Prepared
from leyline_proxy.model.session import Departed, RetainedTurn
from leyline_proxy.model.undeclared import UndeclaredRules
from leyline_proxy.plan.naming import name_spans
from leyline_proxy.plan.synthesis import TurnPlan, synthesize
from leyline_proxy.plan.token_diff import MIN_RUN, SourceView, diff_tokens

ROLES = ("user", "assistant", "system")
CONVERSATIONS = st.lists(
    st.tuples(st.sampled_from(ROLES), st.text("abcdefgh ", min_size=1, max_size=60)),
    min_size=1,
    max_size=8,
).map(lambda items: [{"role": role, "content": text} for role, text in items])


def plan_from(
    source: RetainedTurn, prepared: Prepared, rules: UndeclaredRules = NOTHING
) -> TurnPlan:
    """Return the plan against one turn, before an engine that computes its first positions
    again."""
    return plan_of([source], prepared, rules, sink=ATTENTION_SINK)


def _edited(data: st.DataObject, messages: list[Message]) -> list[Message]:
    """The list with some messages dropped, rewritten or added."""
    result: list[Message] = []
    for message in messages:
        action = data.draw(st.sampled_from(["keep", "keep", "drop", "cut", "insert"]))
        if action == "cut":
            place = data.draw(st.integers(0, len(message["content"])))
            result.append({**message, "content": message["content"][:place] + "…"})
        elif action != "drop":
            result.append(message)
        if action == "insert":
            result.append({"role": "user", "content": "inserted"})
    return result or [{"role": "user", "content": "x"}]


@given(CONVERSATIONS, st.data(), st.text("ab", max_size=9))
def test_kept_runs_are_equal_and_tile_with_hunks(
    old: list[Message], data: st.DataObject, output: str
) -> None:
    """Every kept run is the same tokens; runs and hunks leave no gap up to the tail."""
    new = _edited(data, old)
    source, prompt = turn_of(old, output=output), render(new)
    view = SourceView(source.tokens, source.rendered.spans, len(source.rendered.tokens))
    diff = diff_tokens(view, prompt, diff_messages(old, new))
    for run in diff.kept:
        assert source.tokens[run.start : run.end] == prompt.tokens[run.dest : run.dest_end]
        assert run.length >= MIN_RUN or run.start == run.dest == 0
    pieces: list[tuple[int, int, int, int]] = [
        *((run.start, run.end, run.dest, run.dest_end) for run in diff.kept),
        *((hunk.start, hunk.end, hunk.new_start, hunk.new_end) for hunk in diff.hunks),
    ]
    at = (0, 0)
    for start, end, new_start, new_end in sorted(pieces):
        assert (start, new_start) == at
        at = (end, new_end)
    assert not diff.hunks or at == (len(source.tokens), len(prompt.tokens))


@given(CONVERSATIONS, st.data(), st.sampled_from([NOTHING, ANYTHING]))
def test_segments_tile_the_prompt_with_equal_tokens(
    old: list[Message], data: st.DataObject, rules: UndeclaredRules
) -> None:
    """Segments cover the prompt in order, and each copy equals the text there."""
    source, prepared = turn_of(old), prepare(_edited(data, old), [], [], 1)
    plan, prompt = (
        plan_from(source, prepared, rules),
        render(prepared.messages).tokens,
    )
    cursor = 0
    for segment in plan.segments:
        assert segment.dest == cursor
        cursor = segment.dest_end
        if isinstance(segment, CopySegment):
            assert source.tokens[segment.start : segment.end] == prompt[segment.dest : cursor]
    assert cursor == (len(prompt) if plan.segments else 0)
    if rules is NOTHING:
        assert plan.planned is not Outcome.SPLICED and not plan.directives
    elif plan.directives and all(d.mode is Mode.AMORTIZE for d in plan.directives):
        end = max(s.end for s in plan.segments if isinstance(s, CopySegment))
        result = apply_directives(source.tokens[:end], plan.directives)
        assert result == prompt[: len(result)].tolist()


def _agent(observation: str, *later: str) -> list[dict[str, Any]]:
    head = [{"role": "system", "content": "a system prompt that is longer than the sink is wide"}]
    body = [
        {"role": "user", "content": observation},
        *({"role": "user", "content": t} for t in later),
    ]
    return [*head, *body]


def test_a_mapped_role_is_amortised_and_an_unmapped_one_is_not() -> None:
    """Only roles that the rules map are copied after the change."""
    source = turn_of(_agent("observation 123456789", "what comes behind it stays", "end"))
    changed = prepare(
        _agent("observation …", "what comes behind it stays", "end", "new"), [], [], 1
    )
    spliced, exact = (
        plan_from(source, changed, ANYTHING),
        plan_from(source, changed, NOTHING),
    )
    assert spliced.planned is Outcome.SPLICED and len(spliced.directives) == 1
    assert [e.mode for e in exact.edits] == ["exact"] and not exact.segments
    assert plan_of([source], changed, UndeclaredRules.parse(["tool=amortize"])).segments == ()


def test_an_exact_edit_cuts_what_lies_behind() -> None:
    """Amortised edits before it still copy; nothing after it does, nor is any later edit reported
    as spliced."""
    first, last = ("stays the same in both turns",), "and this 123456789 closes the conversation"
    source = turn_of(_agent("observation 123456789", *first, "exactly so", last))
    messages = _agent("observation 123456789", *first, "EXACTLY so", last)
    prepared = prepare(messages, [Rule("123456789", "…", "amortize")], [], 1)
    plan = plan_from(source, prepared, NOTHING)
    cut = render(prepared.messages).spans[3].start
    assert plan.planned is Outcome.SPLICED
    assert [edit.mode for edit in plan.edits] == ["amortize", "exact", "amortize"]
    assert [directive.start < cut for directive in plan.directives] == [True]
    assert max(s.dest_end for s in plan.segments if isinstance(s, CopySegment)) <= cut


def test_forget_cuts_at_the_span_and_at_the_first_splice() -> None:
    """Nothing that could have read the span is copied, also by way of an earlier splice."""
    messages = _agent("the key is SECRET indeed", "what comes behind has read it", "end")
    prepared = prepare(messages, [Rule("SECRET", "[x]", "forget")], [], 1)
    for runs, limit in (((), None), ((LineageRun(40, "l"),), 40)):
        source = turn_of(messages, lineage=runs)
        plan = plan_from(source, prepared, ANYTHING)
        (directive,) = plan.directives
        assert directive.mode is Mode.FORGET and plan.planned is Outcome.REPREFILLED
        copies = [s for s in plan.segments if isinstance(s, CopySegment)]
        assert max(s.end for s in copies) <= min(directive.start, limit or directive.start)


def test_an_append_is_no_edit_and_keeps_its_lineage() -> None:
    """A conversation that continues asks for nothing and stays where its KV is."""
    messages = _agent("observation", "more")
    runs = (LineageRun(50, "l"),)
    source = turn_of(messages, output="an answer</>", lineage=runs)
    answer = {"role": "assistant", "content": "an answer"}
    plan = plan_from(source, prepare([*messages, answer], [], [], 1), NOTHING)
    assert (plan.planned, plan.edits, plan.directives) == (Outcome.UNEDITED, (), ())
    assert plan.lineage == runs


def test_another_models_turn_is_no_source() -> None:
    """KV of other weights is never offered."""
    messages = _agent("observation")
    rendered = render(messages)
    prepared = prepare(messages, [], [], 1)
    names = name_spans("t1", prepared, [], Departed(), rendered)
    plan = synthesize(
        [turn_of(messages)], prepared, rendered, ANYTHING, names=names, model_fingerprint="other"
    )
    assert plan == TurnPlan(spans=plan.spans)
