"""The experiments of ``leyline eval`` on the replay engine, found by entry point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version

from leyline_lab.errors import SubjectError
from leyline_lab.fidelity.chained_rotations import ChainedRotations
from leyline_lab.fidelity.experiment import LENGTHS, EvaluationSessions, Experiment, Scale
from leyline_lab.fidelity.kept_state import KeptState
from leyline_lab.fidelity.removal import Removal
from leyline_lab.fidelity.replay_subject import ReplaySubject
from leyline_lab.fidelity.rotary_sweep import RotarySweep
from leyline_lab.fidelity.storage_floor import StorageFloor
from leyline_lab.fidelity.tables import answer_tables
from leyline_lab.stand_ins.random_models import RANDOM_MODELS, random_model
from leyline_replay.models.loader import ModelLoadError, load_model
from leyline_replay.models.trained import TRAINED_MODEL_NAMES


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
    notes = ()
    left_out: Mapping[str, str] = {}

    def __init__(self, model: str | None, sessions: EvaluationSessions, scale: Scale) -> None:
        self._scale, self._length = scale, LENGTHS[scale]
        self._sessions = sessions
        try:
            loaded = [load_model(name) for name in ([model] if model else TRAINED_MODEL_NAMES)]
        except ModelLoadError as error:
            raise SubjectError(str(error)) from error
        self.served = {each.name: model or each.name for each in loaded}
        """Models that are asked for what a session has shown, by name, as the replay engine is
        given them: all but those with random weights."""
        if not model:
            loaded += map(random_model, RANDOM_MODELS)
        self._loaded = tuple(loaded)
        self._subjects = tuple(ReplaySubject(each, self._length) for each in loaded)

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
        return (
            *answer_tables(self._subjects, self._sessions, tuple(self.served)),
            KeptState(self._subjects),
            Removal(self._loaded),
            RotarySweep(),
            ChainedRotations(),
            StorageFloor(),
        )
