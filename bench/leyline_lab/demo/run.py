"""Replays the recorded session through real stacks, one ``leyline serve`` per arm."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib.resources import as_file, files
from importlib.util import find_spec
from pathlib import Path

from leyline_proxy.installing import pip_install

from ..engines.serve import serving
from ..errors import LabError
from ..replay.arms import Progress, check_same_prompts, run_sessions
from ..replay.driver import ChatDriver
from ..replay.results import Arm, ArmRun
from ..traces.recordings import Trace, read_trace
from .recall import RecallAnswer, ask_all

START_S = 600.0
"""Longest wait for ``leyline serve``, which may have a model to download."""


def shipped_trace() -> Trace:
    """Return the session in the package."""
    with as_file(files("leyline_lab.demo").joinpath("session.jsonl.gz")) as path:
        return read_trace(path)


def missing_engine() -> str | None:
    """Return what the embedded engine lacks, with the command that installs it; None if nothing."""
    for name in ("leyline_replay", "torch", "transformers"):
        if find_spec(name) is None:
            return (
                f"the engine needs the package {name!r}, which isn't installed. Install it with: "
                f"{pip_install('engine')}. Or play to a server that runs: --url URL"
            )
    return None


@dataclass(frozen=True, slots=True)
class Demonstration:
    """The arms' results for the session, and the model's answers afterwards."""

    runs: dict[Arm, ArmRun]
    answers: dict[Arm, tuple[RecallAnswer, ...]]
    """Answers of the arms that ran; see :func:`~leyline_lab.demo.recall.ask_all`."""


def run_arms(
    trace: Trace, policy: str, progress: Progress, *, model: str | None = None
) -> Demonstration:
    """Run both real arms, each on a fresh server, and compute ``off`` from their prompts.

    Raises:
        LabError: a server that does not start or fails, or contradictory figures.
    """
    runs: dict[Arm, ArmRun] = {}
    answers: dict[Arm, tuple[RecallAnswer, ...]] = {}
    for arm in (Arm.RADIX, Arm.SPLICE):
        progress(arm, 0)
        with (
            served(_flags(arm, policy, model)) as base_url,
            closing(ChatDriver(base_url)) as driver,
        ):
            runs[arm] = run_sessions(driver, trace.sessions, arm, progress)
            answers[arm] = ask_all(driver, policy)
    check_same_prompts(runs[Arm.RADIX], runs[Arm.SPLICE])
    return Demonstration({Arm.OFF: runs[Arm.RADIX].switched_off(), **runs}, answers)


def run_against(
    url: str, api_key: str, trace: Trace, policy: str, progress: Progress
) -> Demonstration:
    """Run one arm on a stack that is already running; each request asks for the policy.

    Raises:
        LabError: nothing usable at ``url``, or it refused the very first request.
    """
    base_url = url.rstrip("/").removesuffix("/v1") + "/v1"
    with closing(ChatDriver(base_url, api_key=api_key, policy=policy)) as driver:
        run = run_sessions(driver, trace.sessions, Arm.SPLICE, progress)
        if not run.results:
            raise LabError("; ".join(run.notes) or "no request was answered")
        answers = ask_all(driver, policy)
    return Demonstration({Arm.OFF: run.switched_off(), Arm.SPLICE: run}, {Arm.SPLICE: answers})


@contextmanager
def served(flags: Sequence[str]) -> Iterator[str]:
    """Run ``leyline serve`` with these flags on a free port, and yield its base URL.

    Raises:
        EndpointError: it ends before it serves, or is not up in time.
    """
    with tempfile.TemporaryDirectory(prefix="leyline-demo-") as folder:
        log, deadline = Path(folder, "serve.log"), time.monotonic() + START_S
        all_flags = ["--log-level", "warning", *flags]
        with serving(all_flags, _environment(os.environ), log, deadline) as found:
            yield f"{found.origin}/v1"


def _flags(arm: Arm, policy: str, model: str | None) -> list[str]:
    # Otherwise an arm that can't splice would wait with edits, and so send other prompts.
    chosen = ["--policy", policy, "--edit-timing", "now"]
    chosen += ["--splice" if arm is Arm.SPLICE else "--no-splice"]
    return [*chosen, "--model", model] if model else chosen


def _environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the operator's settings, so the arms differ in one thing."""
    return {name: value for name, value in inherited.items() if not name.startswith("LEYLINE_")}
