"""A session replayed step by step under a policy: every edited prompt, answered by every arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from leyline_lab.fidelity.agreement import (
    Group,
    agreement_table,
    summarise,
)
from leyline_lab.fidelity.comparison import (
    NAIVE,
    REPREFILL,
    SPLICE,
    compare_all,
    edited_answers,
)
from leyline_lab.fidelity.experiment import Record, ResultTable, Scale, SessionStep, spread
from leyline_lab.fidelity.rendering import edits_between
from leyline_lab.fidelity.subject import Subject

_ARMS = (REPREFILL, SPLICE, NAIVE)
_LEFT_OUT = "left_out"

SHORT_PAPER = (
    "Appendix D, table 4, 12 steps of which 6 are edited. First token like the whole history / "
    "like re-prefill, tool names, mean common prefix of 128 tokens: DeepSeek-V2-Lite 6/6, 6/6, "
    "tools 6/6, 128 and 128; JoyAI-LLM Flash 3/6, 3/6, 4/4, 42 and 42; GLM-4.7-Flash 4/6, 4/6, "
    "2/2, 6 and 10; Moonlight 6/6, 5/6, 3/3, 75 and 50. Appendix I, logits, L2 to the whole "
    "history and to re-prefill, top-10 overlap: 927, 927, 0.52; Moonlight 471, 441, 0.85; JoyAI "
    "329, 339, 0.87; GLM 2816, 2647, 0.83. The models are others."
)
LONG_PAPER = (
    "Appendix G, table 7, 50 steps. First token like the whole history, with one edit and with "
    "several: DeepSeek-V2-Lite 16/16 and 33/33; GLM-4.7-Flash 13/16 and 26/29; Moonlight 9/16 and "
    "13/23; JoyAI-LLM Flash 2/16 and 1/27. The models are others."
)


class Trajectories:
    """Replays one session.

    Args:
        steps: the session's requests; those that the policy didn't change are no cases.
        quick: number of cases per model of a quick run.
        by_edits: True for a row each of steps with one edit and with several.
    """

    def __init__(
        self,
        subjects: Sequence[Subject],
        steps: Sequence[SessionStep],
        *,
        name: str,
        title: str,
        paper: str,
        quick: int,
        by_edits: bool,
    ) -> None:
        self.name, self.title = name, title
        self._subjects = {subject.name: subject for subject in subjects}
        self._steps = steps
        self._paper = paper
        self._quick = quick
        self._by_edits = by_edits

    def cases(self, scale: Scale) -> Sequence[str]:
        """Return ``MODEL/STEP`` of each edited step, counted from 1."""
        edited = [index for index, step in enumerate(self._steps, start=1) if step.edits]
        chosen = spread(edited, self._quick) if scale is Scale.QUICK else edited
        return [f"{name}/{index}" for name in self._subjects for index in chosen]

    def measure(self, case: str) -> Record:
        """Answer a step's prompt in every way."""
        name, number = case.rsplit("/", maxsplit=1)
        subject, step = self._subjects[name], self._steps[int(number) - 1]
        whole = subject.render(step.messages, step.tools)
        edited = subject.render(step.edited, step.tools)
        edits = edits_between(whole, edited)
        facts = {"edits": step.edits, "directives": len(edits), "prompt": len(whole.tokens)}
        if not edits or not subject.fits(max(len(whole.tokens), len(edited.tokens))):
            return {**facts, _LEFT_OUT: 1}
        return {**facts, **compare_all(edited_answers(subject, whole.tokens, edits))}

    def table(self, records: Mapping[str, Record]) -> ResultTable:
        """Return agreement by model, and by number of edits if asked for."""
        groups = self._groups(records)
        left_out = sum(bool(record.get(_LEFT_OUT)) for record in records.values())
        said = summarise(groups)
        if left_out:
            said += f"\n{left_out} steps are left out: they don't fit the model's context."
        labels = ("model", "edits") if self._by_edits else ("model",)
        question = (
            "A policy edits the history at each step. Does the answer over the spliced cache "
            "begin like the answer over the whole history, or like the one over the edited "
            "prompt prefilled again?"
        )
        return agreement_table(
            (self.title, question), labels, groups, _ARMS, said, paper=self._paper
        )

    def _groups(self, records: Mapping[str, Record]) -> list[Group]:
        groups = []
        for name in self._subjects:
            cases = [
                record
                for case, record in records.items()
                if case.rsplit("/", maxsplit=1)[0] == name and not record.get(_LEFT_OUT)
            ]
            if not self._by_edits:
                groups.append(Group((name,), cases))
                continue
            for label, several in (("one", False), ("several", True)):
                chosen = [case for case in cases if (int(case["edits"] or 0) > 1) is several]
                groups.append(Group((name, label), chosen))
        return groups
