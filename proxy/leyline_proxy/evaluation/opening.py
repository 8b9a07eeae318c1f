"""The choice of the engine that an evaluation measures, by ``--engine`` and ``--model``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from leyline_engine.fidelity.experiment import Scale
from leyline_engine.fidelity.steps import EvaluationSessions

from ..replay.sglang_process import shipped_folder
from .engines import Evaluation, open_evaluation
from .remote import Access, endpoint_evaluation
from .serving import sglang_with_control

REPLAY, SGLANG = "replay", "sglang"
_SECRET = "LEYLINE_HINTS_SECRET"  # noqa: S105 - the name of a variable


@dataclass(frozen=True, slots=True)
class Target:
    """An engine and its model, as the user names them."""

    engine: str
    """``replay``, ``sglang`` or an engine's address."""
    model: str | None
    api_key: str | None
    """Of the engine at an address."""
    log: Path
    """Output of a server that is started."""


@contextmanager
def opened(target: Target, sessions: EvaluationSessions, scale: Scale) -> Iterator[Evaluation]:
    """Yield the experiments on a target; a server that they need runs until the end.

    Raises:
        EngineUnavailable: packages of the replay engine are missing.
        SglangProcessError: SGLang doesn't come up.
        SubjectError: the model or the endpoint can't be measured.
    """
    model = target.model
    secret = os.environ.get(_SECRET) or None
    if target.engine == REPLAY:
        yield open_evaluation(model, sessions, scale)
    elif target.engine == SGLANG:
        with sglang_with_control(model, target.log) as url:
            access = Access(url, None, secret, has_control=True)
            with endpoint_evaluation(access, None, sessions, scale) as evaluation:
                yield evaluation
    else:
        folder = None if model is None else shipped_folder(model) or Path(model).expanduser()
        access = Access(target.engine, target.api_key, secret)
        with endpoint_evaluation(access, folder, sessions, scale) as evaluation:
            yield evaluation
