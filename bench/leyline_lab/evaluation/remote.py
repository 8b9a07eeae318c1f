"""The experiments on a running engine; cases in which it copies nothing are left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from leyline_engine.contract import Capability
from leyline_lab.errors import NothingCopiedError, SubjectError
from leyline_lab.fidelity.experiment import (
    LENGTHS,
    EvaluationSessions,
    Experiment,
    Record,
    ResultTable,
    Scale,
)

from ..traces.renderer import folder_renderer
from .endpoint import EngineEndpoint
from .remote_subject import RemoteSubject
from .rendering import ModelRenderer

_NOT_COPIED = "nothing_copied"


class LeavingOut:
    """An experiment whose cases may have nothing to copy; its finding counts them.

    Args:
        experiment: the one that measures.
    """

    def __init__(self, experiment: Experiment) -> None:
        self.name = experiment.name
        self.title = experiment.title
        self._experiment = experiment

    def cases(self, scale: Scale) -> Sequence[str]:
        """Return all cases."""
        return self._experiment.cases(scale)

    def measure(self, case: str) -> Record:
        """Measure one case, or note that it is left out."""
        try:
            return self._experiment.measure(case)
        except NothingCopiedError:
            return {_NOT_COPIED: 1}

    def table(self, records: Mapping[str, Record]) -> ResultTable:
        """Return the table of the others."""
        used = {case: each for case, each in records.items() if _NOT_COPIED not in each}
        table = self._experiment.table(used)
        left_out = len(records) - len(used)
        if not left_out:
            return table
        cases = "1 case is" if left_out == 1 else f"{left_out} cases are"
        said = f"{cases} left out: too little follows the edit, so the engine copies nothing."
        return msgspec.structs.replace(table, finding=f"{table.finding}\n{said}")


_IN_PROCESS = "it measures the replay engine's own code, in this process: leave --engine out"
LEFT_OUT = {
    "removal": "it compares logits to the last bit, and an endpoint gives rounded log "
    "probabilities: leave --engine out",
    "rotary_sweep": _IN_PROCESS,
    "chained_rotations": _IN_PROCESS,
    "storage_floor": _IN_PROCESS,
}
"""Tables that no endpoint can be measured for, and why."""


@dataclass(frozen=True, slots=True)
class Access:
    """The way to a running engine."""

    url: str
    api_key: str | None = None
    hints_secret: str | None = None
    has_control: bool = False
    """True if the server leaves keys of the control's sessions unrotated."""


class EndpointEvaluation:
    """Experiments on the model of a running engine; see :class:`~.engines.Evaluation`."""

    left_out = LEFT_OUT

    def __init__(
        self,
        subject: RemoteSubject,
        capability: Capability,
        renderer: ModelRenderer,
        sessions: EvaluationSessions,
        scale: Scale,
    ) -> None:
        self._subject = subject
        self._capability = capability
        self._renderer = renderer
        self._tables = tuple(map(LeavingOut, _answer_tables(subject, sessions)))
        self._length = LENGTHS[scale]
        self.served = {subject.name: subject.name}

    @property
    def engine(self) -> str:
        """The engine's name and version."""
        return f"{self._capability.engine} over HTTP, {self._capability.engine_version}"

    @property
    def model(self) -> str:
        """Name of the model."""
        return self._subject.name

    @property
    def isolates(self) -> bool:
        """True if the engine keeps the KV of tenants apart."""
        return self._capability.isolates

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the model."""
        return self._subject.fingerprint

    @property
    def identity(self) -> Mapping[str, str]:
        """Facts that measured cases depend on; neither address nor run of the engine."""
        return {
            "engine": self.engine,
            "model": self.model,
            "fingerprint": self.fingerprint,
            "kv": self._capability.kv.dtype if self._capability.kv is not None else "",
            "renderer": self._renderer.digest,
            "tokens": str(self._length),
            "likeliest": str(self._subject.likeliest),
            "control": "yes" if self._subject.has_control else "no",
            "context": str(self._subject.max_context),
        }

    @property
    def notes(self) -> Sequence[str]:
        """Facts that a reader must know of these figures, in sentences."""
        likeliest, vocabulary = self._subject.likeliest, self._capability.vocab_size
        covered = (
            f"all {vocabulary:,} tokens"
            if likeliest == vocabulary
            else f"the {likeliest:,} likeliest of {vocabulary:,} tokens: L2 over those that both "
            "answers have, KL with all others counted as one"
        )
        said = [
            "The endpoint gives log probabilities, not logits. L2, KL and top 10 are of log "
            f"probabilities, over {covered}."
        ]
        if not self._subject.has_control:
            said.append(
                "There is no control: this endpoint can't run without rotation. --engine sglang "
                "starts a server that can."
            )
        return said

    def experiments(self) -> Sequence[Experiment]:
        """Return the experiments, in the order of the report."""
        return self._tables


@contextmanager
def endpoint_evaluation(
    access: Access, model: Path | None, sessions: EvaluationSessions, scale: Scale
) -> Iterator[EndpointEvaluation]:
    """Yield the experiments on a running engine.

    Args:
        model: folder with tokenizer and chat template; None asks the engine for them.

    Raises:
        SubjectError: the engine can't be reached, isn't one of Leyline's, or can't splice; or
            there is no tokenizer or template.
    """
    secret = access.hints_secret
    with EngineEndpoint(access.url, api_key=access.api_key, hints_secret=secret) as endpoint:
        capability = endpoint.capability()
        document = endpoint.renderer() if model is None else folder_renderer(model)
        if document is None:
            raise SubjectError(
                f"{endpoint.url} gives no tokenizer: name the folder of its model with --model PATH"
            )
        renderer = ModelRenderer(capability.model, document)
        subject = RemoteSubject(
            endpoint,
            capability,
            renderer,
            LENGTHS[scale],
            hints_secret=secret,
            has_control=access.has_control,
        )
        yield EndpointEvaluation(subject, capability, renderer, sessions, scale)


def _answer_tables(subject: RemoteSubject, sessions: EvaluationSessions) -> Sequence[Experiment]:
    from leyline_lab.fidelity.tables import answer_tables

    return answer_tables([subject], sessions, [subject.name])
