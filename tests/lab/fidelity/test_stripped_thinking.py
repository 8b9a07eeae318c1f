"""Thinking that a template strips: the edit that it makes, and what the model still knows."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import islice
from random import Random

import pytest

from leyline_engine.contract import apply_directives
from leyline_lab.fidelity.comparison import (
    FULL,
    LATER,
    NAIVE,
    REPREFILL,
    SPLICE,
)
from leyline_lab.fidelity.experiment import Record, Scale
from leyline_lab.fidelity.recall_prompts import ThoughtQuestion, draw_thinking
from leyline_lab.fidelity.rendering import edit_of_extension
from leyline_lab.fidelity.replay_subject import ReplaySubject
from leyline_lab.fidelity.stripped_thinking import StrippedThinking
from leyline_replay.models.loader import load_model
from leyline_replay.models.trained import DEFAULT_MODEL_NAME, THINKING_MODEL_NAME

CASES = 5
ANSWER_TOKENS = 12  # of a look-up, the tool's name


@cache
def subject(name: str) -> ReplaySubject:
    """A shipped model."""
    return ReplaySubject(load_model(name, device="cpu"), ANSWER_TOKENS)


@cache
def records() -> Mapping[str, Record]:
    """Some cases of each question, measured."""
    experiment = StrippedThinking([subject(THINKING_MODEL_NAME)], [THINKING_MODEL_NAME])
    wanted = [case for case in experiment.cases(Scale.FULL) if int(case.rsplit("/")[-1]) < CASES]
    return {case: experiment.measure(case) for case in wanted}


def count(what: str, asked: ThoughtQuestion, arm: str) -> int:
    """The number of cases in which an arm's answer is so."""
    return sum(
        int(record[f"{what}|{arm}"] or 0)
        for case, record in records().items()
        if case.split("/")[-2] == asked
    )


@pytest.mark.parametrize(
    "asked",
    [pytest.param(ThoughtQuestion.THOUGHT, marks=pytest.mark.nightly), ThoughtQuestion.BEFORE_CALL],
)
def test_a_chosen_value_is_lost_by_a_prefill_and_not_by_a_splice(asked: ThoughtQuestion) -> None:
    """The whole history and the splice know it; a new prefill can't, and mostly looks it up."""
    assert count("right", asked, FULL) >= CASES - 2
    assert count("right", asked, REPREFILL) == 0
    assert count("looked up", asked, REPREFILL) >= CASES - 3
    assert min(count("right", asked, arm) for arm in (SPLICE, LATER)) >= CASES // 2
    assert count("right", asked, NAIVE) < count("right", asked, LATER) // 2


def test_a_setting_that_stays_is_known_to_all_but_the_control() -> None:
    """An output that was read after the thinking moves, and can still be read."""
    for arm in (FULL, REPREFILL, SPLICE, LATER):
        assert count("right", ThoughtQuestion.OUTPUT, arm) >= CASES - 2, arm
    assert count("right", ThoughtQuestion.OUTPUT, NAIVE) <= 2


def test_the_table_names_models_that_strip_nothing() -> None:
    """They have no cases, and the finding says why; without any other, the table is empty."""
    both = [subject(name) for name in (DEFAULT_MODEL_NAME, THINKING_MODEL_NAME)]
    experiment = StrippedThinking(both, [THINKING_MODEL_NAME])
    assert {case.split("/")[0] for case in experiment.cases(Scale.QUICK)} == {THINKING_MODEL_NAME}
    assert set(experiment.cases(Scale.QUICK)) < set(experiment.cases(Scale.FULL))
    table = experiment.table(records())
    assert {len(row) for row in table.rows} == {len(table.columns)}
    assert len(table.rows) == len(ThoughtQuestion) * 4
    assert "as it must be" in table.finding
    assert f"strips no thinking: {DEFAULT_MODEL_NAME}." in table.finding
    alone = StrippedThinking(both[:1], [])
    assert not alone.cases(Scale.FULL)
    empty = alone.table({})
    assert not empty.rows and empty.chart is None and DEFAULT_MODEL_NAME in empty.finding


def test_answers_of_other_models_are_compared_only() -> None:
    """Without knowledge of the task there is no right answer."""
    experiment = StrippedThinking([subject(THINKING_MODEL_NAME)], [])
    (case,) = islice(experiment.cases(Scale.QUICK), 1)
    record = experiment.measure(case)
    assert f"{SPLICE}|full|first" in record
    assert not any(measure.startswith(("right", "looked up")) for measure in record)
    assert "right" not in experiment.table({case: record}).finding


@pytest.mark.parametrize("asked", list(ThoughtQuestion))
def test_the_edit_cuts_the_thinking_alone(asked: ThoughtQuestion) -> None:
    """It makes the later prompt's beginning, and what it cuts is the thought."""
    thinking = subject(THINKING_MODEL_NAME)
    for seed in range(20):
        drawn = draw_thinking(Random(seed), asked, 4)
        before = thinking.render(drawn.before, opened=False)
        after = thinking.render([*drawn.before, *drawn.then])
        edit = edit_of_extension(before, after)
        assert edit is not None and not edit.replacement
        kept = apply_directives(before.tokens, [edit])
        assert after.tokens[: len(kept)].tolist() == kept
        (thought,) = [
            each["reasoning_content"] for each in drawn.before if "reasoning_content" in each
        ]
        cut = thinking.tokenizer.decode(before.tokens[edit.start : edit.end])
        assert cut == f"<think>\n{thought}\n</think>\n\n"
        left = thinking.tokenizer.decode(after.tokens)
        assert thought not in left
        assert asked is not ThoughtQuestion.OUTPUT or f"={drawn.answer}" in left


def test_a_conversation_that_is_only_continued_needs_no_edit() -> None:
    """Neither does one that another template shows in another way to the end."""
    plain = subject(DEFAULT_MODEL_NAME)
    drawn = draw_thinking(Random(0), ThoughtQuestion.THOUGHT, 2)
    before = plain.render(drawn.before, opened=False)
    after = plain.render([*drawn.before, *drawn.then])
    assert edit_of_extension(before, after) is None
    other = plain.render([{"role": "user", "content": "Hi"}])
    assert edit_of_extension(before, other) is None
