"""The text of a stub: the same edits with four kinds of stubs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle, islice, product
from random import Random

from leyline_engine.contract import Directive, Mode
from leyline_lab.fidelity.agreement import (
    Group,
    agreement_table,
    groups_of,
    mean_of,
    percent,
    rate,
    summarise,
)
from leyline_lab.fidelity.comparison import (
    NAIVE,
    REPREFILL,
    SPLICE,
    compare,
    compare_all,
    edited_answers,
)
from leyline_lab.fidelity.experiment import (
    Cell,
    Record,
    ResultTable,
    Scale,
    SessionStep,
    spread,
)
from leyline_lab.fidelity.rendering import edits_between
from leyline_lab.fidelity.subject import Answer, Subject

_ARMS = (REPREFILL, SPLICE, NAIVE)
FAITHFUL, PAD, SCRAMBLED, EMPTY = "faithful", "pad", "scrambled", "empty"
STUBS = (FAITHFUL, PAD, SCRAMBLED, EMPTY)
_TEXT = "[truncated]"
_AS_FAITHFUL = "as_faithful"

_PAPER = (
    "Appendix M, 4 stubs, 3 trajectories, 2 models: on DeepSeek-V2-Lite all stubs give the same "
    "characters; on JoyAI-LLM Flash tool names agree in all 12 cells. The models are others."
)


class Stubs:
    """Replaces what a policy cuts by stubs of four kinds.

    ``faithful`` says that something was cut, ``pad`` is as many tokens of white space,
    ``scrambled`` as many random tokens, ``empty`` nothing.

    Args:
        sessions: requests by the session's name.
    """

    name = "stubs"
    title = "Stub ablation"

    def __init__(
        self, subjects: Sequence[Subject], sessions: Mapping[str, Sequence[SessionStep]]
    ) -> None:
        self._subjects = {subject.name: subject for subject in subjects}
        self._sessions = sessions
        self._known: tuple[str, Answer] | None = None
        """The splice with the faithful stub of one step, by the case's name without its stub."""

    def cases(self, scale: Scale) -> Sequence[str]:
        """Return ``MODEL/SESSION/STEP/STUB``, for some edited steps of each session."""
        return [
            f"{name}/{session}/{index}/{stub}"
            for name in self._subjects
            for session, steps in self._of_scale(scale)
            for index in _chosen(steps, scale)
            for stub in STUBS
        ]

    def _of_scale(self, scale: Scale) -> Sequence[tuple[str, Sequence[SessionStep]]]:
        """Return the sessions that are edited; a quick run takes the last."""
        sessions = list(self._sessions.items())
        return sessions[-1:] if scale is Scale.QUICK else sessions

    def measure(self, case: str) -> Record:
        """Answer a step's prompt with a stub in place of each cut text."""
        name, session, number, stub = case.rsplit("/", maxsplit=3)
        subject, step = self._subjects[name], self._sessions[session][int(number) - 1]
        whole = subject.render(step.messages, step.tools)
        edits = edits_between(whole, subject.render(step.edited, step.tools))
        if not edits or not subject.fits(len(whole.tokens) * 2):
            return {"left_out": 1}
        drawn = _with_stub(subject, edits, stub, case)
        answers = edited_answers(subject, whole.tokens, drawn)
        step_name = case.removesuffix(f"/{stub}")
        if self._known is None or self._known[0] != step_name:
            faithful = _with_stub(subject, edits, FAITHFUL, case)
            self._known = step_name, subject.spliced(whole.tokens, faithful)
        delta = sum(edit.delta for edit in drawn)
        same = _as_faithful(self._known[1], answers[SPLICE])
        return {"delta": delta, **compare_all(answers), **same}

    def table(self, records: Mapping[str, Record]) -> ResultTable:
        """Return agreement by model and stub."""
        used = {case: each for case, each in records.items() if not each.get("left_out")}
        groups = groups_of(used, product(self._subjects, STUBS), 4, (0, 3))
        return agreement_table(
            (self.title, "Does the answer over a splice depend on the text of the stub?"),
            ("model", "stub"),
            groups,
            _ARMS,
            self._finding(groups),
            paper=_PAPER,
            more=(("answer as with faithful",), _share_as_faithful),
        )

    def _finding(self, groups: Sequence[Group]) -> str:
        """Return the share of answers that are as with the faithful stub; then the usual."""
        lines = []
        for name in self._subjects:
            others = [
                record
                for group in groups
                if group.labels[0] == name and group.labels[1] != FAITHFUL
                for record in group.records
            ]
            if others:
                same, first = (
                    percent(rate(others, f"{_AS_FAITHFUL}|{measure}"))
                    for measure in ("same", "first")
                )
                lines.append(
                    f"{name}, {len(others)} splices with another stub: the whole answer is the "
                    f"same as with the faithful one in {same}, its first token in {first}."
                )
        return "\n".join([summarise(groups), *lines])


def _chosen(steps: Sequence[SessionStep], scale: Scale) -> Sequence[int]:
    """Return edited steps, counted from 1; a quick run's are among the full run's."""
    full = spread([index for index, step in enumerate(steps, start=1) if step.edits], 7)
    return spread(full, 1) if scale is Scale.QUICK else full


def _with_stub(
    subject: Subject, edits: Sequence[Directive], stub: str, case: str
) -> list[Directive]:
    """Return the edits with another replacement."""
    text = subject.encode(_TEXT)
    rng = Random(case)

    def made() -> tuple[int, ...]:
        if stub == FAITHFUL:
            return text
        if stub == PAD:
            return tuple(islice(cycle(subject.encode(" ")), len(text)))
        return tuple(rng.choice(subject.ordinary) for _ in text) if stub == SCRAMBLED else ()

    return [Directive(edit.start, edit.end, made(), Mode.AMORTIZE) for edit in edits]


def _as_faithful(reference: Answer, other: Answer) -> Record:
    found = compare(reference, other)
    return {f"{_AS_FAITHFUL}|{measure}": value for measure, value in found.items()}


def _share_as_faithful(records: Sequence[Record], arm: str) -> tuple[Cell, ...]:
    return (mean_of(records, f"{_AS_FAITHFUL}|same") if arm == SPLICE else None,)
