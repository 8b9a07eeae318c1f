"""The choice of the engine that an evaluation measures, by ``--engine`` and ``--model``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from leyline_lab.fidelity.experiment import EvaluationSessions, Scale

from ..engines.process import shipped_folder
from ..engines.sglang import evaluation_server
from ..engines.stack import ServedEngine, StackOptions
from .engines import Evaluation, open_evaluation
from .remote import Access, endpoint_evaluation
from .running import POOL_TOKENS


def is_address(engine: str) -> bool:
    """Return True if ``--engine`` is an engine's address: http or https, a host, and no key.

    Keys in an address would be shown in errors.
    """
    try:
        url = httpx.URL(engine)
    except httpx.InvalidURL:
        return False
    plain = not (url.userinfo or url.query or url.fragment)
    return url.scheme in ("http", "https") and bool(url.host) and plain


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


@dataclass(frozen=True, slots=True)
class Opened:
    """An engine that is ready."""

    evaluation: Evaluation
    stack: StackOptions
    """Puts a proxy in front of it, or of an engine of its kind."""


@contextmanager
def opened(target: Target, sessions: EvaluationSessions, scale: Scale) -> Iterator[Opened]:
    """Yield the experiments on a target; a server that they need runs until the end.

    Raises:
        EngineUnavailable: packages of the replay engine are missing.
        EngineProcessError: SGLang doesn't come up.
        SubjectError: the model or the endpoint can't be measured.
    """
    model = target.model
    secret = os.environ.get(_SECRET) or None
    if target.engine == REPLAY:
        evaluation = open_evaluation(model, sessions, scale)
        yield Opened(evaluation, StackOptions(pool_tokens=POOL_TOKENS))
    elif target.engine == SGLANG:
        with evaluation_server(model, target.log) as url:
            access = Access(url, None, secret, has_control=True)
            with _at_address(access, None, sessions, scale) as found:
                yield found
    else:
        folder = None if model is None else shipped_folder(model) or Path(model).expanduser()
        access = Access(target.engine, target.api_key, secret)
        with _at_address(access, folder, sessions, scale) as found:
            yield found


@contextmanager
def _at_address(
    access: Access, folder: Path | None, sessions: EvaluationSessions, scale: Scale
) -> Iterator[Opened]:
    with endpoint_evaluation(access, folder, sessions, scale) as evaluation:
        served = ServedEngine(
            access.url.rstrip("/"), access.api_key, access.hints_secret, evaluation.isolates
        )
        yield Opened(evaluation, StackOptions(served=served))
