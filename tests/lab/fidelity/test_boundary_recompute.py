"""Boundary recompute: the figures of settings, the choice among them, and the control."""

from __future__ import annotations

import itertools
from functools import cache
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_engine.contract import Recompute
from leyline_lab.fidelity.boundary_recompute import KINDS, TURNS, BoundaryRecompute
from leyline_lab.fidelity.comparison import FULL, NAIVE, REPREFILL
from leyline_lab.fidelity.experiment import Record, ResultTable, Scale
from leyline_lab.fidelity.judges import says
from leyline_lab.fidelity.recall_prompts import FACTS, draw_question
from leyline_lab.fidelity.recompute_rows import SETTINGS, Setting, rows_of
from leyline_lab.fidelity.replay_subject import ReplaySubject
from leyline_replay.models.loader import load_model

MODEL = "leyline-recall"


@cache
def subject() -> ReplaySubject:
    """The shipped model with short answers."""
    return ReplaySubject(load_model(MODEL), 8)


def experiment() -> BoundaryRecompute:
    """The experiment on the shipped model."""
    return BoundaryRecompute([subject()], [MODEL])


def table_of(says_by_setting: dict[str, tuple[int, int]], cases: int = 60) -> ResultTable:
    """The table of made-up cases: per setting, how many cut and how many kept values it says."""
    records: dict[str, Record] = {}
    for kept in (0, 1):
        for number in range(cases):
            record: dict[str, Any] = {"kept": kept, "prompt": 1000, "after": 500, "margin": 3.0}
            record |= {f"{FULL}|says": 1, f"{REPREFILL}|says": kept}
            for setting in map(str, SETTINGS):
                found = says_by_setting.get(setting, (cases, cases))[kept]
                record[f"{setting}|says"] = int(number < found)
                record[f"{setting}|first"] = 1
                record[f"{setting}|extra"] = cost(setting)
            kind = KINDS[2] if kept else KINDS[0]
            records[f"{MODEL}/{kind}/{number}"] = record
    return experiment().table(records)


def cost(setting: str) -> int:
    """The tokens that a setting computes again, of a prompt of 1,000."""
    found = next(each for each in SETTINGS if str(each) == setting)
    return found.boundary + 4 * bool(found.quotes) + 20 * found.erratum


def last_lines(count: int) -> list[int]:
    """The first prompts of a kind that ask for the last line of what is cut."""
    kind = KINDS[0]
    drawn = (
        draw_question(Random(f"{kind}-{number}"), kind.asked, kind.note, TURNS)
        for number in itertools.count()
    )
    last = (number for number, prompt in enumerate(drawn) if prompt.line == FACTS - 1)
    return list(itertools.islice(last, count))


def test_one_token_takes_most_of_what_remains() -> None:
    """Of prompts whose last line is asked for, the plain splice answers some, k = 1 none; moved
    keys without rotation answer nothing that is kept."""
    measured = {
        case: experiment().measure(case)
        for case in [
            *(f"{MODEL}/{KINDS[0]}/{number}" for number in last_lines(3)),
            f"{MODEL}/{KINDS[4]}/0",
            f"{MODEL}/{KINDS[3]}/0",
        ]
    }
    cut = [record for record in measured.values() if not record["kept"]]
    assert sum(int(record["k = 0|says"] or 0) for record in cut) > 0
    assert sum(int(record["k = 1|says"] or 0) for record in cut) == 0
    kept = [record for record in measured.values() if record["kept"]]
    assert all(record[f"{REPREFILL}|says"] and record["k = 1|says"] for record in kept)
    assert not any(record[f"{NAIVE}|says"] for record in kept)
    assert all(record["k = 8|extra"] == 8 for record in measured.values())


def test_the_cheapest_setting_that_reaches_the_goal_is_recommended() -> None:
    """It needs few residual answers, and answers on kept content that are as good."""
    table = table_of({"k = 1": (0, 30), "k = 2": (1, 60), "k = 8": (0, 60), NAIVE: (0, 60)})
    (profile,) = table.profiles
    assert (profile.recompute, profile.erratum, profile.reached) == (Recompute(2), "", True)
    assert f"reached with {Setting(2)}" in table.finding


def test_a_goal_that_nothing_reaches_is_said_to_be_missed() -> None:
    """The setting with the fewest residual answers is recommended then."""
    table = table_of({"k = 16": (3, 60), "k = 1, quotes": (2, 60)})
    (profile,) = table.profiles
    assert (profile.recompute, profile.reached) == (Recompute(1, 3), False)
    assert "reached by no setting" in table.finding


class Uncontrolled(ReplaySubject):
    """A model that can't run without rotation, as most endpoints."""

    has_control = False


def test_without_control_the_table_says_so() -> None:
    """The setting is absent, never zero."""
    uncontrolled = BoundaryRecompute([Uncontrolled(load_model(MODEL), 2)], [MODEL])
    cases = [f"{MODEL}/{kind}/0" for kind in (KINDS[0], KINDS[3])]
    table = uncontrolled.table({case: uncontrolled.measure(case) for case in cases})
    assert NAIVE not in {row[1] for row in table.rows}
    assert "No control" in table.finding
    assert {"k = 0", "k = 64", "k = 1, quotes", "margin 4"} <= {row[1] for row in table.rows}


def test_a_model_without_answers_to_both_kinds_has_no_rows() -> None:
    """Cases may be left out, as where an engine copies only long texts."""
    case = f"{MODEL}/{KINDS[0]}/0"
    table = experiment().table({case: experiment().measure(case)})
    assert table.rows == ()
    assert table.profiles == ()


def test_few_cases_recommend_nothing() -> None:
    """A quick run says that it asked too little."""
    table = table_of({"k = 1": (0, 10)}, cases=10)
    assert table.profiles == ()
    assert "20 cases, which are too few" in table.finding


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=40), st.data())
def test_a_margin_takes_the_prefills_answer_below_it(
    answers: list[tuple[bool, bool]], data: st.DataObject
) -> None:
    """The answer is re-prefill's if the lead is smaller, and else the splice's."""
    margins = data.draw(st.lists(st.sampled_from([0.1, 0.7, 1.5, 9.0]), min_size=len(answers)))
    records: list[Record] = []
    for index, ((spliced, again), margin) in enumerate(zip(answers, margins, strict=False)):
        record: dict[str, Any] = {"kept": index % 2, "prompt": 100, "after": 50, "margin": margin}
        record |= {f"{REPREFILL}|says": int(again)}
        for setting in map(str, SETTINGS):
            record |= {f"{setting}|says": int(spliced), f"{setting}|first": 1}
            record |= {f"{setting}|extra": 0}
        records.append(record)
    row = next(row for row in rows_of(records) if row.name == "margin 1")
    cut = [
        again if margin < 1 else spliced
        for index, ((spliced, again), margin) in enumerate(zip(answers, margins, strict=False))
        if index % 2 == 0
    ]
    assert row.residual.value == pytest.approx(sum(cut) / len(cut))
    low = sum(margin < 1 for _, margin in zip(answers, margins, strict=False))
    assert row.extra == pytest.approx(50 * low / len(answers))


def test_a_quick_run_is_a_part_of_the_full_run() -> None:
    """Models that aren't asked have no cases."""
    full, quick = (set(experiment().cases(scale)) for scale in (Scale.FULL, Scale.QUICK))
    assert quick < full
    assert BoundaryRecompute([subject()], ["another"]).cases(Scale.FULL) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("copper", True),
        ("It is `copper`.", True),
        ("cache=copper", True),
        ("coppers", False),
        ("", False),
    ],
)
def test_a_value_is_said_as_a_word(text: str, found: bool) -> None:
    """Punctuation and the setting's name may be around it."""
    assert says(text, "copper") is found
