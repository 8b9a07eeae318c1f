"""Experiments on tiny models: every one yields a table, and its control looks bad."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from itertools import islice
from math import hypot, log
from random import Random

import numpy as np
import pytest

from leyline_engine.contract import Directive, Outcome, Receipt, TokenCounts, apply_directives
from leyline_lab.errors import SubjectError
from leyline_lab.fidelity.agreement import (
    COLUMNS,
    Group,
    describe_control,
    rows_of,
)
from leyline_lab.fidelity.comparison import (
    NAIVE,
    SPLICE,
    compare,
    compare_all,
)
from leyline_lab.fidelity.experiment import Experiment, Record, Scale, SessionStep
from leyline_lab.fidelity.random_edits import RandomEdits, draw_spans
from leyline_lab.fidelity.recall_prompts import draw_prompt, long_session
from leyline_lab.fidelity.recall_task import Note
from leyline_lab.fidelity.replay_subject import ReplaySubject
from leyline_lab.fidelity.single_prompt import SinglePrompt
from leyline_lab.fidelity.stubs import FAITHFUL, STUBS, Stubs
from leyline_lab.fidelity.subject import Answer, Subject
from leyline_lab.fidelity.trajectories import Trajectories
from leyline_lab.stand_ins.random_models import RANDOM_MODELS, random_model

STEPS = 14
LENGTH = 4


@cache
def subject(name: str = "random-gqa") -> ReplaySubject:
    """A tiny random model with short answers."""
    return ReplaySubject(random_model(name), LENGTH)


@cache
def session() -> tuple[SessionStep, ...]:
    """A recall session whose old outputs are cut to their beginning."""
    steps = []
    for messages in long_session(STEPS):
        results = [index for index, each in enumerate(messages) if each["role"] == "tool"]
        edited = list(messages)
        for index in results[:-2]:
            edited[index] = {**messages[index], "content": messages[index]["content"][:40] + " …"}
        steps.append(SessionStep(messages, tuple(edited)))
    return tuple(steps)


def trajectory(subjects: Sequence[Subject]) -> Trajectories:
    """The session as an experiment."""
    return Trajectories(subjects, session(), name="t", title="T", paper="", quick=3, by_edits=True)


def measured(experiment: Experiment, count: int) -> dict[str, Record]:
    """The first cases of a quick run."""
    cases = experiment.cases(Scale.QUICK)
    return {case: experiment.measure(case) for case in islice(cases, count)}


def experiments() -> list[Experiment]:
    """All experiments on one random model."""
    subjects = [subject()]
    return [
        SinglePrompt(subjects, [], session()[-1]),
        trajectory(subjects),
        RandomEdits(subjects, session()[5]),
        Stubs(subjects, {"recall": session()}),
    ]


@pytest.mark.parametrize("experiment", experiments(), ids=lambda each: each.name)
def test_every_experiment_yields_a_table_with_its_control(experiment: Experiment) -> None:
    """Rows fit the columns, JSON holds them, and moved keys without rotation are farther off."""
    records = json.loads(json.dumps(measured(experiment, 6), allow_nan=False))
    splice, naive = (
        sum(record[f"{arm}|nearer|l2"] for record in records.values()) for arm in (SPLICE, NAIVE)
    )
    assert naive > 1.5 * splice
    table = experiment.table(records)
    assert {len(row) for row in table.rows} == {len(table.columns)}
    assert {row[table.columns.index("arm")] for row in table.rows} >= {SPLICE, NAIVE}
    assert "random-gqa" in table.finding and "as it must be" in table.finding
    chart = table.chart
    assert chart is not None
    assert {len(values) for values in chart.series.values()} == {len(chart.x)}


@pytest.mark.parametrize("experiment", experiments(), ids=lambda each: each.name)
def test_a_quick_run_is_a_part_of_the_full_one(experiment: Experiment) -> None:
    """Cases have names of their own, and all of the quick run's are the full run's."""
    full = experiment.cases(Scale.FULL)
    quick = experiment.cases(Scale.QUICK)
    assert len(set(full)) == len(full) >= len(quick) > 0
    assert set(quick) <= set(full)


@pytest.mark.parametrize("name", RANDOM_MODELS)
def test_a_case_depends_on_its_name_alone(name: str) -> None:
    """Measured twice, by another object and after other cases, it has the same figures."""
    first = RandomEdits([subject(name)], session()[5])
    cases = first.cases(Scale.QUICK)
    once = first.measure(cases[1])
    again = RandomEdits([ReplaySubject(random_model(name), LENGTH)], session()[5])
    again.measure(cases[0])
    assert again.measure(cases[1]) == once


@pytest.mark.parametrize("length", [10, 4])
def test_the_control_differs_in_the_rotation_alone(length: int) -> None:
    """An edit that moves nothing gives the same logits with and without it, any other doesn't."""
    prompt = subject().render(session()[5].messages).tokens
    edit = Directive(20, 30, (77,) * length)
    found = compare(
        subject().spliced(prompt, [edit]), subject().spliced(prompt, [edit], rotated=False)
    )
    assert (float(found["l2"] or 0) < 0.01) == (length == 10)


def test_a_splice_is_no_prefill() -> None:
    """It begins from the whole prompt's KV, so the edited prompt's own logits differ."""
    prompt = subject().render(session()[5].messages).tokens
    edit = Directive(40, 80, (77,))  # the first 32 positions are never spliced
    spliced = subject().spliced(prompt, [edit])
    again = subject().prefilled(apply_directives(prompt, [edit]))
    assert spliced.receipt.tokens.spliced == len(prompt) - 81
    assert again.receipt.tokens.prefilled == len(prompt) - 39
    assert float(compare(again, spliced)["l2"] or 0) > 0.1


def test_an_edit_that_the_engine_refuses_is_named() -> None:
    """A splice that isn't one is an error, and never a row of the table."""
    prompt = subject().render(session()[5].messages).tokens
    with pytest.raises(SubjectError, match="nothing_to_reuse"):
        subject().spliced(prompt, [Directive(20, 30, tuple(prompt[20:30]))])


def test_answers_end_with_the_message_or_at_their_length() -> None:
    """The recall task's look-up ends before the limit, and a text of random weights doesn't."""
    answer = subject().prefilled(subject().render(session()[1].messages).tokens)
    assert len(answer.tokens) == LENGTH
    assert answer.first.dtype == np.float32 and answer.first.shape == (4096,)


def test_stubs_are_of_one_length_or_empty() -> None:
    """All but the empty one move the text after them alike; the faithful one equals itself."""
    experiment = Stubs([subject()], {"recall": session()})
    records = measured(experiment, len(STUBS))
    deltas = {case.rsplit("/", 1)[1]: int(each["delta"] or 0) for case, each in records.items()}
    assert deltas[FAITHFUL] == deltas["pad"] == deltas["scrambled"] > deltas["empty"]
    for case, record in records.items():
        same = record["as_faithful|same"], record["as_faithful|l2"]
        assert (same == (1, 0.0)) == case.endswith(FAITHFUL), case


def test_a_trajectory_s_rows_are_by_number_of_edits() -> None:
    """Steps with one edit are counted apart from those with several."""
    experiment = trajectory([subject()])
    cases = experiment.cases(Scale.FULL)
    edits = [session()[int(case.rsplit("/", 1)[1]) - 1].edits for case in cases]
    records = {case: experiment.measure(case) for case in cases}
    table = experiment.table(records)
    at = table.columns.index("cases")
    counts = {row[1]: row[at] for row in table.rows}
    assert counts == {"one": edits.count(1), "several": len(edits) - edits.count(1)}
    assert all(
        each["directives"] == count for each, count in zip(records.values(), edits, strict=True)
    )


def test_steps_beyond_the_context_are_left_out() -> None:
    """They are counted in the finding, and no other experiment measures a part of a prompt."""
    small = ReplaySubject(random_model("random-gqa"), LENGTH)
    small.max_context = 600
    experiment = trajectory([small])
    records = {case: experiment.measure(case) for case in experiment.cases(Scale.FULL)}
    left_out = sum("left_out" in record for record in records.values())
    assert 0 < left_out < len(records)
    assert f"{left_out} steps are left out" in experiment.table(records).finding
    with pytest.raises(SubjectError, match="600 tokens"):
        small.prefilled([5] * 597)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("count", [1, 2])
def test_random_spans_are_apart(inside: bool, count: int) -> None:
    """They have 8 to 200 tokens, in order, and begin at a content if asked for."""
    prompt = subject().render(session()[5].messages)
    starts = {span[0] for span in prompt.contents if span}
    for seed in range(50):
        spans = draw_spans(Random(seed), prompt, count, inside=inside)
        flat = [place for span in spans for place in span]
        assert len(spans) == count and flat == sorted(set(flat))
        assert all(8 <= end - start <= 200 for start, end in spans)
        assert flat[0] >= 8 and flat[-1] <= len(prompt.tokens) - 8
        if inside:
            assert {start for start, _ in spans} <= starts


def said(*logits: float, tokens: tuple[int, ...] = (1,), text: str = "") -> Answer:
    """An answer with these logits of its first token."""
    receipt = Receipt(message_id="m", outcome=Outcome.UNEDITED, tokens=TokenCounts())
    return Answer(np.array(logits, dtype=np.float32), tokens, text, receipt)


def test_answers_are_compared_by_the_textbook() -> None:
    """Divergence from the reference, distance, common tokens, likeliest tokens and tools."""
    call = '<tool_call>{"name": "run", "arguments": {}}</tool_call>'
    one = said(log(0.75), log(0.25), tokens=(5, 6, 7), text=call)
    two = said(log(0.5), log(0.5), tokens=(5, 6, 8), text=call.replace("run", "read"))
    found = compare(one, two)
    assert found["kl"] == pytest.approx(0.75 * log(1.5) + 0.25 * log(0.5), abs=1e-6)
    assert found["l2"] == pytest.approx(hypot(log(1.5), log(2.0)), abs=1e-6)
    assert (found["common"], found["same"], found["tool"]) == (2, 0, 0)
    assert compare(one, said(0, 0))["tool"] is None
    low, high = said(*range(40)), said(*range(35), -1, -1, -1, -1, -1)
    assert compare(low, high)["top"] == 0.5


def test_references_that_differ_are_counted() -> None:
    """The table says whom an arm follows there, and how far it is from the nearer reference."""
    arms = {"full": said(2, 0, 0), "re-prefill": said(0, 2, 0)}
    near = compare_all({**arms, SPLICE: said(0, 2, 1), NAIVE: said(0, 0, 9)})
    alike = compare_all({"full": arms["full"], "re-prefill": arms["full"], SPLICE: arms["full"]})
    assert near[f"{SPLICE}|nearer|l2"] == pytest.approx(1.0)
    assert near[f"{NAIVE}|nearer|l2"] == pytest.approx(85**0.5)
    (row,) = rows_of([Group(("m",), [near, near, alike])], [SPLICE])
    cells = dict(zip(("model", *COLUMNS), row, strict=True))
    assert cells["first = full"] == pytest.approx(1 / 3, abs=1e-6)
    assert cells["first = re-prefill"] == 1
    assert (cells["references differ"], cells["cases"]) == (2, 3)
    assert [cells[f"then: {of}"] for of in ("full", "re-prefill", "neither")] == [0, 1, 0]
    assert cells["L2 nearer"] == pytest.approx(2 / 3, abs=1e-6)
    assert cells["tool calls"] == 0 and cells["tool = full"] is None


def test_a_control_that_looks_good_is_reported() -> None:
    """Distances that aren't larger without rotation prove nothing, and the finding says so."""
    near, far = {"splice|nearer|l2": 1.0}, {"no rotation|nearer|l2": 1.0}
    assert "says nothing" in describe_control([{**near, **far}] * 3)
    far = {"no rotation|nearer|l2": 5.0}
    assert "as it must be" in describe_control([{**near, **far}] * 3)
    noisy = [{**near, "no rotation|nearer|l2": value} for value in (0.5, 1.0, 2.0)]
    assert "within the noise" in describe_control(noisy)


@pytest.mark.parametrize("note", list(Note))
def test_recall_prompts_show_the_answer_once(note: Note) -> None:
    """The output shows it, and nothing else does but a note that restates it."""
    for seed in range(20):
        prompt = draw_prompt(Random(seed), note, 4)
        shown = [
            index
            for index, message in enumerate(prompt.messages)
            if f"={prompt.answer}" in str(message["content"])
            and prompt.messages[-1]["content"][9:-2] in str(message["content"])
        ]
        expected = [prompt.output] + [prompt.output + 1] * (note is Note.RESTATED)
        assert shown == expected
        early, late = (
            prompt.messages[1 : prompt.output - 2],
            prompt.messages[prompt.output + 2 : -1],
        )
        assert early and late and early != late
        lines = str(prompt.messages[prompt.output]["content"]).splitlines()
        assert lines[prompt.line].endswith(f"={prompt.answer}")
