"""Thinking that the model's own template strips: what is lost of it, by arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from random import Random

from leyline_engine.contract import apply_directives
from leyline_lab.fidelity.agreement import (
    Group,
    agreement_table,
    describe_control,
    either,
    groups_of,
    mean_of,
    percent,
    rate,
)
from leyline_lab.fidelity.comparison import (
    FULL,
    LATER,
    NAIVE,
    REPREFILL,
    SPLICE,
    compare_all,
    control,
)
from leyline_lab.fidelity.experiment import (
    Cell,
    Record,
    ResultTable,
    Scale,
)
from leyline_lab.fidelity.judges import called_tool
from leyline_lab.fidelity.recall_prompts import ThoughtQuestion, draw_thinking
from leyline_lab.fidelity.rendering import edit_of_extension
from leyline_lab.fidelity.subject import Subject

_ARMS = (REPREFILL, SPLICE, LATER, NAIVE)
_TURNS = 6
_COUNTS = {Scale.QUICK: 3, Scale.FULL: 100}
_LOOK_UP = "lookup"


class StrippedThinking:
    """Strips the thinking of a turn, and asks for what it held some turns later.

    The edit is the template's own: the difference between the conversation up to the turn's end
    and the same with more messages. ``splice`` makes it when the user's next message comes, so the
    rest of the turn is all that moves. ``splice, later`` makes it in front of the question, when
    other turns have read the thinking, too; ``no rotation`` is its control. Models whose template
    strips nothing are left out.

    Args:
        recall: names of the models that know the task with thinking; the answers of others are
            only compared.
    """

    name = "stripped_thinking"
    title = "Stripped thinking"

    def __init__(self, subjects: Sequence[Subject], recall: Sequence[str]) -> None:
        self._subjects = {each.name: each for each in subjects if _strips(each)}
        self._append_only = [each.name for each in subjects if each.name not in self._subjects]
        self._recall = recall

    def cases(self, scale: Scale) -> Sequence[str]:
        """Return ``MODEL/ASKED/NUMBER``; none if no model's template strips thinking."""
        drawn = product(self._subjects, ThoughtQuestion, range(_COUNTS[scale]))
        return [f"{name}/{asked}/{number}" for name, asked, number in drawn]

    def measure(self, case: str) -> Record:
        """Answer a prompt in every way."""
        name, asked, number = case.rsplit("/", maxsplit=2)
        subject = self._subjects[name]
        drawn = draw_thinking(Random(f"{asked}-{number}"), ThoughtQuestion(asked), _TURNS)
        before = subject.render(drawn.before, opened=False)
        after = subject.render([*drawn.before, *drawn.then])
        edit, asked_at = edit_of_extension(before, after), after.contents[-1]
        length = len(before.tokens) + len(after.tokens)
        if edit is None or asked_at is None or not subject.fits(length):
            return {"left_out": 1}
        stripped = apply_directives(before.tokens, [edit])
        then, question = after.tokens[len(stripped) :], after.tokens[asked_at[0] :]
        history = [*before.tokens, *then[: len(then) - len(question)]]
        answers = {
            FULL: subject.whole([*history, *question]),
            REPREFILL: subject.prefilled(after.tokens),
            SPLICE: subject.spliced(before.tokens, [edit], then),
            LATER: subject.spliced(history, [edit], question),
            **control(subject, history, [edit], question),
        }
        record = {"delta": edit.delta, **compare_all(answers)}
        if name in self._recall:
            for arm, answer in answers.items():
                record[f"right|{arm}"] = int(answer.text == drawn.answer)
                record[f"looked up|{arm}"] = int(called_tool(answer.text) == _LOOK_UP)
        return record

    def table(self, records: Mapping[str, Record]) -> ResultTable:
        """Return agreement by model and question, and the shares of right answers and look-ups."""
        used = {case: each for case, each in records.items() if not each.get("left_out")}
        groups = groups_of(used, product(self._subjects, ThoughtQuestion), 3, (0, 1))
        question = (
            "A turn's thinking holds a value that nothing else shows, and the template strips "
            "it at the user's next message. Does the model still know the value some turns "
            "later, over the splice or after a new prefill?"
        )
        return agreement_table(
            (self.title, question),
            ("model", "asked"),
            groups,
            _ARMS,
            self._finding(groups),
            more=(("right", "looked up"), _more),
        )

    def _finding(self, groups: Sequence[Group]) -> str:
        lines = []
        for name in self._subjects:
            own = [group for group in groups if group.labels[0] == name]
            if cases := [each for group in own for each in group.records]:
                arms = [arm for arm in _ARMS[1:] if f"{arm}|{FULL}|first" in cases[0]]
                like = ", ".join(f"{percent(either(cases, arm))} ({arm})" for arm in arms)
                lines.append(
                    f"{name}, {len(cases)} cases: the answer begins like one of the references in "
                    f"{like}. {describe_control(cases, LATER)}"
                )
            lines += [
                f"{name}, asked for {group.labels[1]}: {_describe(group.records)}"
                for group in own
                if any(f"right|{SPLICE}" in each for each in group.records)
            ]
        if self._append_only:
            names = ", ".join(self._append_only)
            lines.append(f"Left out, because the template strips no thinking: {names}.")
        return "\n".join(lines)


def _strips(subject: Subject) -> bool:
    drawn = draw_thinking(Random(0), ThoughtQuestion.THOUGHT, 0)
    before = subject.render(drawn.before, opened=False)
    return edit_of_extension(before, subject.render([*drawn.before, *drawn.then])) is not None


def _describe(records: Sequence[Record]) -> str:
    right, looked_up = (
        ", ".join(f"{percent(rate(records, f'{what}|{arm}'))} ({arm})" for arm in (FULL, *_ARMS))
        for what in ("right", "looked up")
    )
    return f"right answers {right}; look-ups {looked_up}."


def _more(records: Sequence[Record], arm: str) -> tuple[Cell, ...]:
    return mean_of(records, f"right|{arm}"), mean_of(records, f"looked up|{arm}")
