"""The experiments of an engine, found by entry point and never by import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, cast

from leyline_engine.fidelity.experiment import Experiment, Scale
from leyline_engine.fidelity.steps import EvaluationSessions

from ..upstream.embedded import load_replay_part

GROUP = "leyline.evals"
"""Group of entry points: functions of a model's name or None, the sessions and the scale."""


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
    opened = load_replay_part(GROUP)
    return cast("Evaluation", opened(model, sessions, scale))
