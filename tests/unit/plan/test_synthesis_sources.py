"""Plans that draw on several retained turns: no poorer than the best one, and no less careful."""

from __future__ import annotations

from typing import Any

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

from leyline_engine.contract import Directive, Mode, Outcome, check_directives
from leyline_proxy.edits.prepare import prepare
from leyline_proxy.model.messages import Message
from leyline_proxy.model.session import Departed, RetainedTurn
from leyline_proxy.model.undeclared import UndeclaredRules
from leyline_proxy.plan.naming import name_spans
from leyline_proxy.plan.synthesis import MIN_SPLICED, TurnPlan, synthesize


@st.composite
def branches(draw: st.DrawFn) -> tuple[list[list[Message]], Rule]:
    """Lists that were each made of one conversation, the last of them this turn's; and a policy."""
    base = draw(numbered())
    count = draw(st.integers(2, 4))
    lists = [apply_callers(base, draw(callers_edits(len(base)))) for _ in range(count)]
    return lists, Rule(f"word{draw(st.integers(0, len(base) - 1))} ", "")


def sources_of(lists: list[list[Message]], policies: list[Any]) -> list[RetainedTurn]:
    """Retained turns, newest last."""
    return [
        retained(prepare(messages, policies, [], 0), f"t{index}")
        for index, messages in enumerate(lists)
    ]


def by_source(plan: TurnPlan) -> list[list[Directive]]:
    """The plan's directives per source."""
    return [
        [directive for directive in plan.directives if directive.source == index]
        for index in range(len(plan.sources))
    ]


@given(branches(), st.sampled_from([NOTHING, ANYTHING]), st.booleans())
def test_plans_over_several_sources_are_sound(
    given_: tuple[list[list[Message]], Rule], rules: UndeclaredRules, cut_before: bool
) -> None:
    """Segments reproduce the prompt, directives fit their source and no copy brings one back."""
    lists, rule = given_
    sources = sources_of(lists[:-1], [rule] if cut_before else [])
    prepared = prepare(lists[-1], [rule], [], 1)
    plan, prompt = plan_of(sources, prepared, rules), render(prepared.messages)
    assert plan == plan_of(sources, prepared, rules)
    named = {turn.turn: turn for turn in sources}
    used = [named[source.turn] for source in plan.sources]
    cursor = 0
    for segment in plan.segments:
        assert segment.dest == cursor < segment.dest_end
        cursor = segment.dest_end
    assert cursor in (0, len(prompt.tokens))
    for copy in copies(plan):
        source = used[copy.source]
        assert source.tokens[copy.start : copy.end] == prompt.tokens[copy.dest : copy.dest_end]
        for directive in by_source(plan)[copy.source]:
            assert min(copy.end, directive.end) <= max(copy.start, directive.start)
    for source, directives in zip(used, by_source(plan), strict=True):
        check_directives(directives, len(source.tokens))
    assert {copy.source for copy in copies(plan)} | {0} >= set(range(len(used)))
    alone = [plan_of([source], prepared, rules).reusable_tokens for source in sources]
    assert plan.reusable_tokens >= max(alone)


@given(branches(), st.booleans())
def test_no_source_lends_what_lies_behind_a_callers_edit(
    given_: tuple[list[list[Message]], Rule], cut_before: bool
) -> None:
    """Each source ends where the caller changed something in it, whatever another could lend; up
    to there, what the policy's own edits moved is lent."""
    lists, rule = given_
    sources = sources_of(lists[:-1], [rule] if cut_before else [])
    prepared = prepare(lists[-1], [rule], [], 1)
    plan, prompt = plan_of(sources, prepared), render(prepared.messages)
    # The judge: where the source would differ from the prompt if the policy had seen it, too.
    limits = {
        turn.turn: first_change(render(rule.transform(messages, 0)), prompt)
        for turn, messages in zip(sources, lists, strict=False)
    }
    for copy in copies(plan):
        assert copy.dest_end <= limits[plan.sources[copy.source].turn]
    found = {turn.turn: first_change(turn.rendered, prompt) for turn in sources}
    if any(limits[name] - found[name] >= WORTH_IT for name in limits):
        lent = max((copy.dest_end for copy in copies(plan)), default=0)
        assert lent > max(limits.values()) - WORTH_IT


WORTH_IT = 2 * MIN_SPLICED
"""So many tokens after a policy's edit are copied, whatever is too short to be kept among them."""
BASE = [
    {"role": "system", "content": "a system prompt that is longer than the sink is wide"},
    {"role": "user", "content": "the task, at some length, so that it is worth a copy of its own"},
]
LEFT = {"role": "user", "content": "the left branch looked into folders, at considerable length"}
RIGHT = {"role": "user", "content": "the right branch read documents, and at no smaller length"}
LAST = {"role": "user", "content": "now go on"}
USERS = UndeclaredRules.parse({"user": "amortize"})


def test_a_prompt_draws_on_two_branches() -> None:
    """Parts that only one branch has each come from it; each brings the directives it needs."""
    sources = sources_of([BASE, [*BASE, LEFT, LAST], [*BASE, RIGHT, LAST]], [])
    prepared = prepare([*BASE, LEFT, RIGHT, {**LAST, "content": "and now?"}], [], [], 3)
    plan = plan_of(sources, prepared, USERS)
    assert plan.planned is Outcome.SPLICED
    assert {source.turn for source in plan.sources} == {"t1", "t2"}
    text = "".join(map(chr, render(prepared.messages).tokens))
    parts = {"t1": "", "t2": ""}
    for copy in copies(plan):
        parts[plan.sources[copy.source].turn] += text[copy.dest : copy.dest_end]
    assert LEFT["content"] in parts["t1"] and LEFT["content"] not in parts["t2"]
    assert RIGHT["content"] in parts["t2"] and RIGHT["content"] not in parts["t1"]
    assert all(d.mode is Mode.AMORTIZE for d in plan.directives)
    assert plan.edits, "the turn's account isn't empty"
    assert plan_of(sources, prepared).planned is not Outcome.SPLICED, "nobody allowed it"


def test_an_exact_edit_in_one_branch_is_no_obstacle_in_another() -> None:
    """Text that one source may not lend is lent by another that was never edited there."""
    behind = {"role": "assistant", "content": "a long answer that stands behind it in both of them"}
    changed = {"role": "assistant", "content": "an assistant's words that the caller changed"}
    words = {"role": "assistant", "content": "an assistant's words as the model wrote them"}
    sources = sources_of([[*BASE, words, behind], [*BASE, changed, behind]], [])
    prepared = prepare([*BASE, words, behind, LEFT], [], [], 2)
    plan = plan_of(sources, prepared)
    assert plan.edits == () and plan.planned is Outcome.UNEDITED
    kept = len("".join(f"<{m['role']}>{m['content']}</>" for m in (*BASE, words, behind)))
    assert plan.reusable_tokens >= kept


def test_a_continuation_looks_no_further() -> None:
    """If the newest turn simply continues, it is the only one that is compared."""
    sources = sources_of([BASE, [*BASE, LEFT]], [])
    prepared = prepare([*BASE, LEFT, RIGHT], [], [], 2)
    prompt = render(prepared.messages)
    names = name_spans("now", prepared, sources, Departed(), prompt)
    expected = plan_of(sources, prepared)
    object.__setattr__(sources[0], "prepared", None)  # comparing it fails from here on
    plan = synthesize(sources, prepared, prompt, NOTHING, names=names, model_fingerprint="m")
    assert plan == expected


def test_a_forgetting_turn_draws_on_one_source() -> None:
    """If anything is forgotten, only one branch is copied, up to what it may have read."""
    sources = sources_of([[*BASE, LEFT, LAST], [*BASE, RIGHT, LAST]], [])
    redact = Rule("folders", "[gone]", "forget")
    prepared = prepare([*BASE, LEFT, RIGHT, LAST], [redact], [], 2)
    plan = plan_of(sources, prepared, USERS)
    assert plan.forgets
    assert {copy.source for copy in copies(plan)} <= {0}
    if plan.sources[0].turn == "t0":
        assert all(copy.end <= len(render(BASE).tokens) for copy in copies(plan))
    assert {plan.sources[d.source].turn for d in plan.directives if d.mode is Mode.FORGET} == {"t0"}
