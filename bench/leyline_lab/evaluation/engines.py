"""The experiments of an engine; those of the replay engine are imported only when it is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from leyline_lab.fidelity.experiment import EvaluationSessions, Experiment, Scale

from ..packages import replay_engine


class Evaluation(Protocol):
    """Experiments on an engine's models."""

    @property
    def engine(self) -> str:
        """Name of the engine."""

    @property
    def model(self) -> str:
        """Names of the models, separated by commas."""

    @property
    def fingerprint(self) -> str:
        """Fingerprints of the models, in the same order."""

    @property
    def identity(self) -> Mapping[str, str]:
        """Facts that measured cases depend on."""

    @property
    def notes(self) -> Sequence[str]:
        """Facts that a reader must know of these figures, in sentences."""

    @property
    def left_out(self) -> Mapping[str, str]:
        """Names of tables that aren't measured, and why."""

    @property
    def served(self) -> Mapping[str, str]:
        """Models that a proxy can be put in front of, by name, as a replay engine of its own is
        given them."""

    def experiments(self) -> Sequence[Experiment]:
        """Return the experiments, in the order of the report."""


def open_evaluation(model: str | None, sessions: EvaluationSessions, scale: Scale) -> Evaluation:
    """Return the experiments of the replay engine.

    Raises:
        EngineUnavailable: its packages are missing.
        SubjectError: the model can't be loaded or measured.
    """
    with replay_engine():
        from leyline_lab.fidelity.replay_eval import ReplayEvaluation
    return ReplayEvaluation(model, sessions, scale)
