"""Figures of what an endpoint gives: a part of a distribution, and perhaps no control."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import hypot, log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_engine.contract import Outcome, Receipt
from leyline_lab.engines.sglang_evaluation import evaluation_command
from leyline_lab.errors import NothingCopiedError, SubjectError
from leyline_lab.evaluation.remote import LeavingOut
from leyline_lab.fidelity.comparison import compare, compare_all, divergence
from leyline_lab.fidelity.experiment import (
    EvaluationSessions,
    Experiment,
    Record,
    ResultTable,
    Scale,
    SessionStep,
)
from leyline_lab.fidelity.recall_prompts import long_session
from leyline_lab.fidelity.replay_subject import ReplaySubject
from leyline_lab.fidelity.subject import Answer
from leyline_lab.fidelity.tables import answer_tables
from leyline_lab.stand_ins.random_models import random_model

NAN = float("nan")


def said(*values: float) -> Answer:
    """An answer with these log probabilities of its first token."""
    receipt = Receipt(message_id="m", outcome=Outcome.UNEDITED)
    return Answer(np.array(values, dtype=np.float32), (1,), "", receipt)


def test_a_part_of_a_distribution_is_compared_by_the_textbook() -> None:
    """Distance over common tokens; divergence with all others as one; top over what both have."""
    one = said(log(0.5), log(0.2), log(0.1), NAN)
    two = said(log(0.25), log(0.25), NAN, log(0.3))
    found = compare(one, two)
    assert found["l2"] == pytest.approx(hypot(log(2), log(0.8)), abs=1e-6)
    others = 0.3 * log(0.3 / 0.5)
    assert found["kl"] == pytest.approx(0.5 * log(2) + 0.2 * log(0.8) + others, abs=1e-6)
    assert found["first"] == 0 and found["top"] == pytest.approx(2 / 3)


def test_answers_with_nothing_in_common_are_not_compared() -> None:
    """No figure is better than a zero, which would look like perfect agreement."""
    record = compare_all(
        {"full": said(-1, NAN, NAN), "re-prefill": said(-1, NAN, NAN), "splice": said(NAN, -1, -1)}
    )
    assert record["splice|full|l2"] is record["splice|full|kl"] is None
    assert record["splice|nearer|l2"] is None
    assert record["splice|full|first"] == record["splice|full|top"] == 0


@given(
    st.lists(st.floats(-8, 8), min_size=3, max_size=12),
    st.lists(st.floats(-8, 8), min_size=3, max_size=12),
    st.integers(1, 12),
)
def test_a_part_never_shows_more_divergence_than_the_whole(
    drawn: list[float], others: list[float], kept: int
) -> None:
    """Counting the rest as one token only loses information, and equal ones stay at zero."""
    size = min(len(drawn), len(others))
    wholes = [np.array(values[:size], dtype=np.float64) for values in (drawn, others)]
    one, two = (values - np.log(np.exp(values).sum()) for values in wholes)
    parts = [values.astype(np.float32) for values in (one, two)]
    parts[0][kept:] = np.nan
    whole = float((np.exp(one) * (one - two)).sum())
    part = divergence(parts[0], parts[1])
    assert part is not None and 0 <= part <= whole + 1e-4
    assert divergence(parts[0], parts[0]) == 0


class Uncontrolled(ReplaySubject):
    """A model that can't be spliced without rotation."""

    has_control = False

    def spliced(self, source: object, edits: object, then: object = (), **options: bool) -> Answer:
        """The splice; the control is an error."""
        if not options.get("rotated", True):
            raise SubjectError("there is no control")
        return super().spliced(source, edits, then)  # type: ignore[arg-type]


def tables() -> tuple[Experiment, ...]:
    """All tables on a tiny model without control."""
    steps = []
    for messages in long_session(13):
        edited = [
            {**each, "content": each["content"][:20]} if each["role"] == "tool" else each
            for each in messages
        ]
        steps.append(SessionStep(messages, tuple(edited)))
    found = EvaluationSessions(tuple(steps), tuple(steps))
    return answer_tables([Uncontrolled(random_model("random-gqa"), 2)], found, ())


@pytest.mark.parametrize(
    "experiment", [each for each in tables() if each.cases(Scale.QUICK)], ids=lambda each: each.name
)
def test_a_table_without_control_says_so(experiment: Experiment) -> None:
    """The arm is absent, never zero, and the finding claims nothing from it."""
    cases = experiment.cases(Scale.QUICK)[:2]
    records = {case: experiment.measure(case) for case in cases}
    assert "no rotation" not in json.dumps(list(records.values()))
    table = experiment.table(records)
    at = table.columns.index("arm")
    assert {row[at] for row in table.rows} >= {"re-prefill", "splice"}
    assert "no rotation" not in {row[at] for row in table.rows}
    overall = table.finding.splitlines()[0]
    assert "No control: this endpoint can't run without rotation" in overall
    assert "farther off" not in table.finding and "without rotation like" not in table.finding
    assert table.chart is not None and len(table.chart.series) == 2


class Halves:
    """An experiment that can't measure odd numbers."""

    name = "halves"
    title = "Halves"

    def cases(self, scale: Scale) -> Sequence[str]:
        """Some numbers."""
        return ["0", "1", "2", "3", "4"]

    def measure(self, case: str) -> Record:
        """A half."""
        if case == "4":
            raise SubjectError("no room")
        if int(case) % 2:
            raise NothingCopiedError("odd")
        return {"half": int(case) // 2}

    def table(self, records: Mapping[str, Record]) -> ResultTable:
        """A row for each case."""
        rows = tuple((case, record["half"]) for case, record in records.items())
        return ResultTable(
            title="", question="", columns=("n", "half"), rows=rows, finding="Half as much."
        )


def test_cases_without_a_copy_are_left_out_and_counted() -> None:
    """They are in no row; any other error ends the run."""
    experiment = LeavingOut(Halves())
    assert (experiment.name, experiment.cases(Scale.FULL)[0]) == ("halves", "0")
    records = {case: experiment.measure(case) for case in "0123"}
    table = experiment.table(records)
    assert table.rows == (("0", 0), ("2", 1))
    assert table.finding.splitlines()[1].startswith("2 cases are left out: too little follows")
    assert experiment.table({"2": records["2"]}).finding == "Half as much."
    with pytest.raises(SubjectError, match="no room"):
        experiment.measure("4")


@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_server_s_flags_win_over_the_defaults(on_cpu: bool) -> None:
    """They come last. On a GPU SGLang chooses its pool; on both Leyline's radix cache serves."""
    command = evaluation_command(["--max-total-tokens=7", "--tp=2"], on_cpu=on_cpu)
    assert command[1:4] == ["-P", "-m", "sglang.launch_server"]
    assert command[-2:] == ["--max-total-tokens=7", "--tp=2"]
    assert "--radix-cache-backend=leyline" in command
    pools = [flag for flag in command if flag.startswith("--max-total-tokens=")]
    assert pools[-1] == "--max-total-tokens=7" and (len(pools) > 1) == on_cpu
    assert ("--dtype=float32" in command) == on_cpu
