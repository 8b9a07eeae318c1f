"""One prompt, one edit: an output that has the answer is cut, and the question is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from random import Random

from leyline_engine.contract import Directive, Mode
from leyline_lab.errors import SubjectError
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
    ASKED,
    FULL,
    NAIVE,
    REPREFILL,
    SPLICE,
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
from leyline_lab.fidelity.recall_prompts import draw_prompt
from leyline_lab.fidelity.recall_task import STUB, Note
from leyline_lab.fidelity.rendering import Rendered
from leyline_lab.fidelity.subject import Subject

_ARMS = (REPREFILL, SPLICE, ASKED, NAIVE)
_ANSWERING = (FULL, *_ARMS)
_SESSION = "session"
_TURNS = 6
_COUNTS = {Scale.QUICK: 6, Scale.FULL: 100}
_SESSION_COUNTS = {Scale.QUICK: 3, Scale.FULL: 12}
_LONG = 40
"""Tokens of a recorded output that is worth cutting."""

_PAPER = (
    "Section 4.1, one prompt: the whole history and the splice answer 34, which is right; "
    "re-prefill answers 0. Appendix H, table 9, 8 prompts: of those where the references differ, "
    "the splice follows the whole history in 1 of 8 and re-prefill in 1 of 8 (Llama-3.1-Minitron-"
    "4B); 0 of 6 and 6 of 6 (Qwen3-4B). The models are others; the paper asks in front of the edit."
)


class SinglePrompt:
    """Cuts one output of a prompt.

    The shipped recall models are asked for a setting that the output showed. Other models answer a
    recorded prompt without one of its outputs; their answers are only compared.

    Args:
        recall: names of the models that know the recall task.
        step: the request of the recorded session.
    """

    name = "single_prompt"
    title = "Single prompt"

    def __init__(
        self, subjects: Sequence[Subject], recall: Sequence[str], step: SessionStep
    ) -> None:
        self._subjects = {subject.name: subject for subject in subjects}
        self._recall = [name for name in self._subjects if name in recall]
        self._step = step

    def cases(self, scale: Scale) -> Sequence[str]:
        """Return ``MODEL/NOTE/NUMBER`` for the recall models, ``MODEL/session/MESSAGE`` else."""
        outputs = [
            index
            for index, message in enumerate(self._step.messages)
            if message.get("role") == "tool" and len(str(message.get("content"))) > len(STUB) * 4
        ]
        # A quick run's outputs are among the full run's.
        chosen = spread(spread(outputs, _SESSION_COUNTS[Scale.FULL]), _SESSION_COUNTS[scale])
        asked = product(self._recall, Note, range(_COUNTS[scale]))
        others = [name for name in self._subjects if name not in self._recall]
        return [f"{name}/{note}/{number}" for name, note, number in asked] + [
            f"{name}/{_SESSION}/{index}" for name in others for index in chosen
        ]

    def measure(self, case: str) -> Record:
        """Answer a prompt in every way."""
        name, kind, number = case.rsplit("/", maxsplit=2)
        subject = self._subjects[name]
        if kind == _SESSION:
            return self._measure_session(subject, int(number))
        return _measure_recall(subject, Note(kind), number)

    def table(self, records: Mapping[str, Record]) -> ResultTable:
        """Return agreement by model and kind of prompt, and the share of right answers."""
        labels = product(self._subjects, (*Note, _SESSION))
        groups = groups_of(records, labels, 3, (0, 1))
        question = (
            "An output that shows a setting is cut, and the model is asked for the setting. "
            "Does it answer over the splice as over the whole history, or as over the edited "
            "prompt prefilled again?"
        )
        return agreement_table(
            (self.title, question),
            ("model", "note"),
            groups,
            _ARMS,
            self._finding(groups),
            paper=_PAPER,
            more=(("right",), _right),
        )

    def _finding(self, groups: Sequence[Group]) -> str:
        lines = [summarise(groups)]
        for name in self._recall:
            cases = [each for group in groups if group.labels[0] == name for each in group.records]
            if cases:
                lines.append(f"{name}: {_describe_right(cases)}")
        return "\n".join(lines)

    def _measure_session(self, subject: Subject, index: int) -> Record:
        prompt = subject.render(self._step.messages, self._step.tools)
        edit = _cut(subject, prompt, index)
        answers = edited_answers(subject, prompt.tokens, [edit])
        return {"delta": edit.delta, **compare_all(answers)}


def _measure_recall(subject: Subject, note: Note, number: str) -> Record:
    drawn = draw_prompt(Random(f"{note}-{number}"), note, _TURNS)
    prompt = subject.render(drawn.messages)
    history = subject.render(drawn.messages[:-1], opened=False).tokens
    question = prompt.tokens[len(history) :]
    edit = _cut(subject, prompt, drawn.output)
    answers = {
        **edited_answers(subject, history, [edit], question),
        ASKED: subject.spliced(prompt.tokens, [edit]),
    }
    right = {f"right|{arm}": int(answer.text == drawn.answer) for arm, answer in answers.items()}
    lines = {"line": drawn.line, "delta": edit.delta}
    return {**lines, **right, **compare_all(answers)}


def _cut(subject: Subject, prompt: Rendered, index: int) -> Directive:
    """Return the edit that puts the stub in place of a message's content."""
    span = prompt.contents[index]
    if span is None:
        raise SubjectError(
            f"{subject.name}: its chat template doesn't show a tool's output as it is, so the "
            "output can't be cut"
        )
    return Directive(*span, subject.encode(STUB), Mode.AMORTIZE)


def _describe_right(records: Sequence[Record]) -> str:
    """Return the share of right answers in words, where the value was nowhere in the edited
    prompt."""
    known = [record for record in records if f"right|{SPLICE}" in record]
    unsaid = [record for record in known if not record[f"right|{REPREFILL}"]]
    arms = [arm for arm in _ANSWERING if any(f"right|{arm}" in record for record in known)]
    shares = ", ".join(f"{percent(rate(known, f'right|{arm}'))} ({arm})" for arm in arms)
    right = [record for record in unsaid if record[f"right|{SPLICE}"]]
    last = max((int(record["line"] or 0) for record in known), default=0)
    in_last = sum(record["line"] == last for record in right)
    return (
        f"Right answers: {shares}. Of {len(unsaid)} prompts that re-prefill answers wrongly, the "
        f"splice answers {len(right)} rightly, {in_last} of them from the output's last line."
    )


def _right(records: Sequence[Record], arm: str) -> tuple[Cell, ...]:
    return (mean_of(records, f"right|{arm}"),)
