"""Kept recurrent states: what a hybrid model answers about an output that was cut, by arm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from random import Random
from statistics import fmean
from typing import Final

from leyline_engine.contract import Directive, Mode
from leyline_lab.fidelity.agreement import numbers, percent
from leyline_lab.fidelity.comparison import (
    NAIVE,
    REFERENCES,
    SPLICE,
    divergence,
    edited_answers,
    first_token,
)
from leyline_lab.fidelity.experiment import Cell, Estimate, Record, ResultTable, Scale
from leyline_lab.fidelity.statistics import share
from leyline_lab.fidelity.subject import Subject
from leyline_lab.fidelity.word_task import ASK, STUB, UNKNOWN, VOCABULARY, cut_session

_EDITS = {"deleted": (), "stub": STUB}
_RESTS = (8, 40, 120)
"""Words after the cut, at least."""
_HEAD = 60
_COUNTS = {Scale.QUICK: 3, Scale.FULL: 24}
_ARMS = (*REFERENCES, SPLICE, NAIVE)
_KEPT = ("before", "after")


class KeptState:
    """Cuts an output of a tool out of a session, and asks for settings.

    Models that don't know the task in single words are left out; of the others, ``python -m
    leyline_lab.training.hybrid`` makes one with recurrent layers.
    """

    name = "kept_state"
    title = "Kept recurrent states"

    def __init__(self, subjects: Sequence[Subject]) -> None:
        self._subjects = {
            each.name: each
            for each in subjects
            if set(VOCABULARY) <= set(each.tokenizer.get_vocab())
        }

    def cases(self, scale: Scale) -> Sequence[str]:
        """Return ``MODEL/EDIT/REST/NUMBER``; none if no model knows the task."""
        drawn = product(self._subjects, _EDITS, _RESTS, range(_COUNTS[scale]))
        return ["/".join(map(str, each)) for each in drawn]

    def measure(self, case: str) -> Record:
        """Ask for a cut setting, for kept ones and for one that was never shown."""
        name, edit, rest, number = case.rsplit("/", maxsplit=3)
        subject = self._subjects[name]
        words = subject.tokenizer.get_vocab()
        drawn = cut_session(Random(f"{rest}-{number}"), _HEAD, int(rest))
        source = [words[word] for word in (*drawn.head, *drawn.output, *drawn.rest)]
        begin, end = len(drawn.head), len(drawn.head) + len(drawn.output)
        stub = tuple(words[word] for word in _EDITS[edit])
        cut = Directive(begin, end, stub, Mode.AMORTIZE)
        record: dict[str, int | float | None] = {}
        for kind, (key, value) in drawn.questions.items():
            answers = edited_answers(subject, source, [cut], [words[ASK], words[key]])
            for arm, answer in answers.items():
                said = first_token(answer)
                record[f"{kind}|right|{arm}"] = int(said == words[value])
                record[f"{kind}|unknown|{arm}"] = int(said == words[UNKNOWN])
                for reference in REFERENCES:
                    apart = divergence(answers[reference].first, answer.first)
                    record[f"{kind}|{reference}|{arm}"] = apart
        return record

    def table(self, records: Mapping[str, Record]) -> ResultTable:
        """Return shares of answers by model, edit, length of the rest, and arm."""
        rows, findings = list[tuple[Cell, ...]](), list[str]()
        for group in product(self._subjects, _EDITS, map(str, _RESTS)):
            own = [each for case, each in records.items() if case.startswith("/".join(group) + "/")]
            rows += [(*group, arm, len(own), *_cells(own, arm)) for arm in _ARMS if own]
        for name in self._subjects:
            own = [each for case, each in records.items() if case.startswith(f"{name}/")]
            findings += [
                f"{name}, {arm}, {len(own)} cases: " + ", ".join(_described(own, arm))
                for arm in _ARMS
                if own
            ]
        return ResultTable(
            title=self.title,
            question=(
                "An output is cut out of a session, and the recurrent state still holds it. Does "
                "the model give the values that were cut, and those that were not?"
            ),
            columns=_COLUMNS,
            rows=tuple(rows),
            finding="\n".join(findings) or "No model knows the task in single words.",
        )


_SHARES: Final = {
    "cut value given": ("cut|right",),
    "cut value unknown": ("cut|unknown",),
    "kept value right": ("before|right", "after|right"),
    "never shown, unknown": ("never|right",),
}
"""Measures by column; the right answer about a key that was never shown is that it is unknown."""
_COLUMNS: Final = (
    *("model", "edit", "words after", "arm", "cases"),
    *(f"{name}{end}" for name in _SHARES for end in ("", " low", " high")),
    *(f"KL {reference}{kind}" for reference in REFERENCES for kind in (", cut", ", kept")),
)


def _cells(records: Sequence[Record], arm: str) -> Iterator[Cell]:
    for names in _SHARES.values():
        found = _share(records, names, arm)
        yield from (found.value, found.low, found.high)
    for reference in REFERENCES:
        for kinds in (("cut",), _KEPT):
            parts = [numbers(records, f"{kind}|{reference}|{arm}") for kind in kinds]
            yield round(fmean(each for part in parts for each in part), 6)


def _described(records: Sequence[Record], arm: str) -> Iterator[str]:
    return (f"{name} {percent(_share(records, of, arm))}" for name, of in _SHARES.items())


def _share(records: Sequence[Record], names: Sequence[str], arm: str) -> Estimate:
    found = [each for name in names for each in numbers(records, f"{name}|{arm}")]
    return share(round(sum(found)), len(found))
