"""Boundary recompute, erratum and margin: what remains of a cut value, and what it costs."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from leyline_engine.contract import (
    Directive,
    FidelityProfile,
    Mode,
    Recompute,
    apply_directives,
    recomputed,
)
from leyline_engine.contract.recompute import Extent
from leyline_lab.errors import SubjectError
from leyline_lab.fidelity.agreement import NO_CONTROL, numbers, percent
from leyline_lab.fidelity.comparison import FULL, REPREFILL, first_token
from leyline_lab.fidelity.experiment import (
    Cell,
    Chart,
    Estimate,
    Record,
    ResultTable,
    Scale,
)
from leyline_lab.fidelity.judges import says
from leyline_lab.fidelity.recall_prompts import Asked, draw_question
from leyline_lab.fidelity.recall_task import STUB, Note
from leyline_lab.fidelity.recompute_rows import (
    BOUNDARIES,
    COLUMNS,
    CONTROL,
    SETTINGS,
    Setting,
    SettingRow,
    rows_of,
)
from leyline_lab.fidelity.subject import Subject

ERRATUM = "[{name} was removed here; later notes on it may be stale]"
"""Note of the ``erratum`` settings, after the stub (the idea: arXiv 2606.17107)."""
TURNS = 9
"""Number of a prompt's other turns."""
_COUNTS = {Scale.QUICK: (3, 2), Scale.FULL: (100, 40)}
"""Prompts of each kind: about what is cut, and about what is kept."""
_FEWEST_CASES = 100
"""Number of cases of a model without which nothing is recommended."""
_FEWEST_RIGHT = 0.9
"""Share of questions that a model must answer rightly from the whole history."""

_PAPER = (
    "The paper has no such test. Boundary recompute is from EPIC (arXiv 2410.15332), the erratum's "
    "idea from arXiv 2606.17107."
)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of prompts."""

    asked: Asked
    note: Note

    @property
    def kept(self) -> bool:
        """True if the answer is in what the edit keeps."""
        return self.asked is not Asked.CUT or self.note is Note.RESTATED

    def __str__(self) -> str:
        return f"{self.asked}-{self.note}"


KINDS = (
    Kind(Asked.CUT, Note.SILENT),
    Kind(Asked.CUT, Note.KEYS),
    Kind(Asked.CUT, Note.RESTATED),
    Kind(Asked.EARLIER, Note.KEYS),
    Kind(Asked.LATER, Note.KEYS),
)


class BoundaryRecompute:
    """Cuts an output of a session, splices in several ways, and asks for what it or others showed.

    A *residual* answer is one with the value that was cut. Questions about what the edit keeps
    show whether answers over the splice are worse than over the edited prompt, prefilled again.

    Args:
        asked: names of the models that are asked; the others have random weights.
    """

    name = "boundary_recompute"
    title = "Boundary recompute and erratum"

    def __init__(self, subjects: Sequence[Subject], asked: Sequence[str]) -> None:
        self._subjects = {each.name: each for each in subjects if each.name in asked}

    def cases(self, scale: Scale) -> Sequence[str]:
        """Return ``MODEL/KIND/NUMBER``."""
        cut, kept = _COUNTS[scale]
        return [
            f"{name}/{kind}/{number}"
            for name in self._subjects
            for kind in KINDS
            for number in range(kept if kind.kept else cut)
        ]

    def measure(self, case: str) -> Record:
        """Answer a question with every setting."""
        name, label, number = case.rsplit("/", maxsplit=2)
        kind = next(kind for kind in KINDS if str(kind) == label)
        return _measure(self._subjects[name], kind, number)

    def table(self, records: Mapping[str, Record]) -> ResultTable:
        """Return a row for each model and setting, and recommend the cheapest that does."""
        by_model = {name: _of_model(records, name) for name in self._subjects}
        # Without questions of both kinds there is nothing to compare.
        full = {name: found for name, found in by_model.items() if _kinds(found) == {0, 1}}
        rows = {name: rows_of(found) for name, found in full.items()}
        profiles = tuple(
            _recommended(self._subjects[name], found, rows[name])
            for name, found in full.items()
            if len(found) >= _FEWEST_CASES and _knows_task(found)
        )
        return ResultTable(
            title=self.title,
            question=(
                "An output is cut, and the first k tokens after the cut are computed again, or the "
                "stub has an erratum. How often is a cut value still answered, are answers on kept "
                "content worse than a prefill's, and how many tokens does it cost?"
            ),
            columns=("model", *COLUMNS),
            rows=tuple((name, *row.cells()) for name, found in rows.items() for row in found),
            finding=_finding(by_model, rows, profiles),
            paper=_PAPER,
            chart=_chart(rows),
            profiles=profiles,
        )


def _measure(subject: Subject, kind: Kind, number: str) -> Record:
    drawn = draw_question(Random(f"{kind}-{number}"), kind.asked, kind.note, TURNS)
    prompt = subject.render(drawn.messages)
    history = subject.render(drawn.messages[:-1], opened=False).tokens
    question = prompt.tokens[len(history) :]
    span = prompt.contents[drawn.output]
    if span is None:
        raise SubjectError(
            f"{subject.name}: its chat template doesn't show a tool's output as it is, so the "
            "output can't be cut"
        )
    start, end = span
    stubs = {
        erratum: subject.encode(STUB + (" " + ERRATUM.format(name="read_config") * erratum))
        for erratum in (False, True)
    }
    plain = [Directive(start, end, stubs[False], Mode.AMORTIZE)]
    again = subject.prefilled(apply_directives(prompt.tokens, plain))
    full = subject.whole(prompt.tokens)
    record: dict[str, Cell] = {
        "kept": int(kind.kept),
        "prompt": len(prompt.tokens),
        "after": len(prompt.tokens) - end,
        f"{FULL}|says": int(says(full.text, drawn.answer)),
        f"{REPREFILL}|says": int(says(again.text, drawn.answer)),
    }
    for setting in SETTINGS:
        if not (setting.rotated or subject.has_control):
            continue
        stub = stubs[setting.erratum]
        how = Recompute(setting.boundary, setting.quotes)
        again_spans = recomputed(array("q", history), [(start, end)], how)
        edits = _directives(history, (start, end), stub, again_spans)
        if edits[-1].end == len(history) and len(edits) == 1:  # this is a prefill
            edited = apply_directives(history, edits)
            answer = subject.prefilled([*edited, *question])
        else:
            answer = subject.spliced(history, edits, question, rotated=setting.rotated)
        reach = sum(high - low for low, high in again_spans)
        record[f"{setting}|says"] = int(says(answer.text, drawn.answer))
        record[f"{setting}|first"] = int(first_token(answer) == first_token(again))
        record[f"{setting}|extra"] = reach + len(stub) - len(stubs[False])
        if setting == SETTINGS[0]:
            second, top = np.sort(answer.first[~np.isnan(answer.first)])[-2:]
            record["margin"] = float(top - second)
    return record


def _directives(
    history: Sequence[int], cut: Extent, stub: Sequence[int], again: Sequence[Extent]
) -> list[Directive]:
    """Return the cut and the spans that are computed again, as directives."""
    spans = [(*cut, tuple(stub))]
    for low, high in again:
        same = tuple(history[low:high])
        if low == spans[-1][1]:
            start, _, before = spans.pop()
            spans.append((start, high, (*before, *same)))
        else:
            spans.append((low, high, same))
    return [Directive(low, high, tokens, Mode.AMORTIZE) for low, high, tokens in spans]


def _of_model(records: Mapping[str, Record], name: str) -> list[Record]:
    return [each for case, each in records.items() if case.rsplit("/", maxsplit=2)[0] == name]


def _kinds(records: Sequence[Record]) -> set[Cell]:
    return {record["kept"] for record in records}


def _knows_task(records: Sequence[Record]) -> bool:
    right = numbers(records, f"{FULL}|says")
    return sum(right) >= _FEWEST_RIGHT * len(right)


def _recommended(
    subject: Subject, records: Sequence[Record], rows: Sequence[SettingRow]
) -> FidelityProfile:
    """Return the cheapest setting that reaches the goal, or else that with the fewest residuals."""
    possible = [row for row in rows if row.setting is not None and row.setting.rotated]
    reaching = sorted((row for row in possible if row.reaches), key=lambda row: row.extra)
    fewest = sorted(possible, key=lambda row: (row.residual.value, row.extra))
    best = (reaching or fewest)[0].setting or SETTINGS[0]
    return FidelityProfile(
        model=subject.name,
        model_fingerprint=subject.fingerprint,
        boundary=best.boundary,
        quotes=best.quotes,
        erratum=ERRATUM if best.erratum else "",
        reached=bool(reaching),
    )


def _finding(
    records: Mapping[str, Sequence[Record]],
    rows: Mapping[str, Sequence[SettingRow]],
    profiles: Sequence[FidelityProfile],
) -> str:
    if not rows:
        return "No model was asked about both cut and kept content."
    lines = []
    recommended = {each.model: each for each in profiles}
    for name, found in rows.items():
        if name not in recommended:
            reason = (
                "answers too few of the questions from the whole history"
                if len(records[name]) >= _FEWEST_CASES
                else f"was asked in {len(records[name])} cases, which are too few"
            )
            lines.append(f"{name} {reason}, so nothing is recommended for it.")
            continue
        profile = recommended[name]
        chosen = _row_of(found, _setting_of(profile))
        plain = _row_of(found, SETTINGS[0])
        verdict = "reached with" if profile.reached else "reached by no setting; nearest is"
        lines.append(
            f"{name}: the goal is {verdict} {chosen.name}. A cut value is still answered in "
            f"{percent(chosen.residual)} of {chosen.residual.count} prompts (plain splice: "
            f"{percent(plain.residual)}), at {chosen.extra_share:.2%} of the prompt's tokens "
            f"({chosen.extra_most:.1%} at most). "
            f"On kept content {chosen.kept:.1%} of answers are right, of re-prefill's "
            f"{chosen.again:.1%} (difference {_points(chosen.difference)} points; plain splice: "
            f"{_points(plain.difference)})."
        )
    if any(row.setting == CONTROL for found in rows.values() for row in found):
        return "\n".join(lines)
    return "\n".join([*lines, NO_CONTROL])


def _setting_of(profile: FidelityProfile) -> Setting:
    return Setting(profile.boundary, profile.quotes, erratum=bool(profile.erratum))


def _points(estimate: Estimate) -> str:
    low, value, high = (100 * each for each in (estimate.low, estimate.value, estimate.high))
    return f"{value:+.1f} ({low:+.1f} to {high:+.1f})"


def _row_of(rows: Sequence[SettingRow], setting: Setting) -> SettingRow:
    return next(row for row in rows if row.setting == setting)


def _chart(rows: Mapping[str, Sequence[SettingRow]]) -> Chart:
    """Return the residual by the number of tokens computed again."""
    return Chart(
        kind="line",
        x_label="tokens after the cut that are computed again",
        y_label="share of prompts in which a cut value is still answered",
        x=BOUNDARIES,
        series={
            name: tuple(_row_of(found, Setting(each)).residual.value for each in BOUNDARIES)
            for name, found in rows.items()
        },
    )
