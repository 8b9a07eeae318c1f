"""The experiments that compare a model's answers; an engine's own are not among them."""

from __future__ import annotations

from collections.abc import Sequence

from leyline_lab.fidelity.boundary_recompute import BoundaryRecompute
from leyline_lab.fidelity.experiment import EvaluationSessions, Experiment
from leyline_lab.fidelity.random_edits import RandomEdits
from leyline_lab.fidelity.single_prompt import SinglePrompt
from leyline_lab.fidelity.stripped_thinking import StrippedThinking
from leyline_lab.fidelity.stubs import Stubs
from leyline_lab.fidelity.subject import Subject
from leyline_lab.fidelity.trajectories import LONG_PAPER, SHORT_PAPER, Trajectories

THINKING_MODEL = "leyline-recall-thinking"
"""Name of the shipped model that thinks."""
RECALL_MODELS = ("leyline-recall", "leyline-recall-notes", THINKING_MODEL)
"""Names of the shipped models, which know the recall task."""
_SHORT = 12
"""Steps of the short trajectory."""
_BASE = 4
"""The step whose prompt random edits change, counted from 1, as in the paper."""


def answer_tables(
    subjects: Sequence[Subject], sessions: EvaluationSessions, asked: Sequence[str]
) -> tuple[Experiment, ...]:
    """Return the experiments that need a model's answers alone, in the order of the report.

    Args:
        asked: names of models that aren't random: they are asked for what a session has shown.
    """
    recorded, recall = sessions.recorded, sessions.recall
    return (
        SinglePrompt(subjects, RECALL_MODELS, recorded[_SHORT - 1]),
        Trajectories(
            subjects,
            recorded[:_SHORT],
            name="trajectory_12",
            title="Trajectory of 12 steps",
            paper=SHORT_PAPER,
            quick=2,
            by_edits=False,
        ),
        RandomEdits(subjects, recorded[_BASE - 1]),
        Trajectories(
            subjects,
            recall,
            name="trajectory_50",
            title="Trajectory of 50 steps",
            paper=LONG_PAPER,
            quick=5,
            by_edits=True,
        ),
        Stubs(subjects, {"recorded": recorded[:_SHORT], "recall": recall}),
        BoundaryRecompute(subjects, asked),
        StrippedThinking(subjects, [THINKING_MODEL]),
    )
