"""The composed ablation: a session through real proxies, in every arm."""

from __future__ import annotations

import pytest

from leyline_engine.contract import FidelityProfile
from leyline_lab.engines.stack import StackOptions
from leyline_lab.errors import SubjectError
from leyline_lab.evaluation.composed import (
    POLICIES,
    Composed,
    ComposedArm,
    ComposedModel,
)

MODEL = "leyline-recall"
PROFILE = FidelityProfile(model=MODEL, boundary=1, quotes=3)


def composed(model: str | None = MODEL) -> Composed:
    """One short session of each case."""
    options = StackOptions(model=model, pool_tokens=4096)
    return Composed([ComposedModel(MODEL, options)], lambda: [PROFILE], sessions=1, turns=9)


def test_arms_play_the_same_session_and_differ_in_what_they_prefill() -> None:
    """Prompts are equal; splices prefill less, a profile a little more than they; all questions
    are judged."""
    case = f"{MODEL}/{POLICIES[2]}/0"
    record = composed().measure(case)
    again, splice, profile = (int(record[f"{arm}|prefilled"] or 0) for arm in ComposedArm)
    assert len({record[f"{arm}|prompt"] for arm in ComposedArm}) == 1
    assert splice < profile < again
    questions = [key.partition("|")[2] for key in record if key.startswith("shown|")]
    assert len(questions) > 3
    assert all(f"{arm}|{place}" in record for arm in ComposedArm for place in questions)
    table = composed().table({case: record})
    assert {len(row) for row in table.rows} == {len(table.columns)}
    assert [row[2] for row in table.rows] == [arm.value for arm in ComposedArm]
    assert table.rows[0][table.columns.index("score, from re-prefill")] == 0
    assert MODEL in table.finding


def test_a_stack_that_cannot_start_is_named() -> None:
    """The run stops with the model, the policy and the arm, and continues later."""
    with pytest.raises(SubjectError, match=f"{MODEL}, keep_all, re-prefill"):
        composed("/nowhere").measure(f"{MODEL}/keep_all/0")
