"""The experiments of ``leyline eval`` on the replay engine, found by entry point."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version

from leyline_engine.fidelity.chained_rotations import ChainedRotations
from leyline_engine.fidelity.errors import SubjectError
from leyline_engine.fidelity.experiment import Experiment, Scale
from leyline_engine.fidelity.random_edits import RandomEdits
from leyline_engine.fidelity.random_subjects import RANDOM_MODELS, random_model
from leyline_engine.fidelity.removal import Removal
from leyline_engine.fidelity.rotary_sweep import RotarySweep
from leyline_engine.fidelity.single_prompt import SinglePrompt
from leyline_engine.fidelity.steps import EvaluationSessions
from leyline_engine.fidelity.storage_floor import StorageFloor
from leyline_engine.fidelity.stripped_thinking import StrippedThinking
from leyline_engine.fidelity.stubs import Stubs
from leyline_engine.fidelity.subject import Subject
from leyline_engine.fidelity.trajectories import LONG_PAPER, SHORT_PAPER, Trajectories
from leyline_engine.replay.models.loader import ModelLoadError, load_model
from leyline_engine.replay.models.trained import THINKING_MODEL_NAME, TRAINED_MODEL_NAMES

_LENGTHS = {Scale.QUICK: 16, Scale.FULL: 128}
"""Tokens that are decoded for each answer, by scale."""
_SHORT = 12
"""Steps of the short trajectory."""
_BASE = 4
"""The step whose prompt random edits change, counted from 1, as in the paper."""


class ReplayEvaluation:
    """Experiments on models of the replay engine.

    Args:
        model: a name that ships, a folder or a hub id; None for the models that ship and two with
            random weights.
        scale: number of cases, and of tokens in each answer.

    Raises:
        SubjectError: the model can't be loaded or spliced, or has no chat template.
    """

    engine = "replay"

    def __init__(self, model: str | None, sessions: EvaluationSessions, scale: Scale) -> None:
        self._scale, self._length = scale, _LENGTHS[scale]
        self._sessions = sessions
        try:
            loaded = [load_model(name) for name in ([model] if model else TRAINED_MODEL_NAMES)]
        except ModelLoadError as error:
            raise SubjectError(str(error)) from error
        if not model:
            loaded += map(random_model, RANDOM_MODELS)
        self._loaded = tuple(loaded)
        self._subjects = tuple(Subject(each, self._length) for each in loaded)

    @property
    def model(self) -> str:
        """Names of the models."""
        return ", ".join(subject.name for subject in self._subjects)

    @property
    def fingerprint(self) -> str:
        """Fingerprints of the models, in the same order."""
        return ", ".join(subject.fingerprint for subject in self._subjects)

    @property
    def identity(self) -> dict[str, str]:
        """Facts that a journal's cases depend on."""
        return {
            "engine": f"{self.engine}, transformers {version('transformers')}",
            "model": self.model,
            "fingerprint": self.fingerprint,
            "tokens": str(self._length),
        }

    def experiments(self) -> Sequence[Experiment]:
        """Return the experiments, in the order of the report."""
        recorded, recall = self._sessions.recorded, self._sessions.recall
        subjects = self._subjects
        return (
            SinglePrompt(subjects, TRAINED_MODEL_NAMES, recorded[_SHORT - 1]),
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
            StrippedThinking(subjects, [THINKING_MODEL_NAME]),
            Removal(self._loaded),
            RotarySweep(),
            ChainedRotations(),
            StorageFloor(),
        )
