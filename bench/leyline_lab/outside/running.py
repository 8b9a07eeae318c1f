"""The runs of a plan, one after the other: a proxy, the benchmark's commands, the account."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..engines.process import last_line, started, wait
from ..errors import BenchmarkError, EndpointError, MissingError, PlanError
from ..files import sole_user, write_whole
from .arms import (
    OutsideArm,
    arm_settings,
    benchmark_environment,
    isolation_settings,
    proxy_environment,
    without_settings,
)
from .benchmarks import Job, Step
from .endpoint import Engine, ask_engine
from .outcomes import (
    Part,
    RunOutcome,
    outcome_of,
    part_path,
    parts_of,
    write_outcome,
    write_part,
)
from .plan import Plan, Run
from .proxy_process import Proxy, running_proxy
from .tasks import with_missing

_NOTE_S = 5.0
"""Time between two notes of the account, of which a killed command loses the last."""
_DOCKER_S = 30.0

Say = Callable[[str], None]


def run_plan(plan: Plan, say: Say) -> dict[Run, RunOutcome]:
    """Run what isn't finished, and return the outcomes of all runs.

    Raises:
        LabError: a run failed, or can't begin. Finished runs stay.
        OSError: the output folder can't be written.
    """
    if plan.benchmark.needs_docker:
        check_docker(plan.benchmark.name)
    with sole_user(plan.out):
        _claim(plan)
        outcomes = {run: _finished(plan, run) for run in plan.runs()}
        left = [run for run, outcome in outcomes.items() if outcome is None]
        if left:
            engine = ask_engine(plan.upstream, plan.model)
            check_engine(engine, plan.arms)
            for run in left:
                say(f"{run.arm}, run {run.number} of {plan.repeat}")
                outcomes[run] = run_once(plan, run, engine)
        return {run: outcome for run, outcome in outcomes.items() if outcome is not None}


def check_docker(benchmark: str) -> None:
    """Check that containers can be started.

    Raises:
        MissingError: there is no Docker, or its daemon doesn't answer.
    """
    program = shutil.which("docker")
    if program is None:
        raise MissingError(f"{benchmark} runs its tasks in containers, and there is no docker")
    try:
        answer = subprocess.run(
            [program, "version", "--format", "{{.Server.Version}}"],
            capture_output=True,
            timeout=_DOCKER_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise MissingError(f"docker doesn't answer within {_DOCKER_S:.0f} s") from error
    if answer.returncode != 0:
        raise MissingError(f"{benchmark} runs its tasks in containers, and docker has no server")


def check_engine(engine: Engine, arms: tuple[OutsideArm, ...]) -> None:
    """Check that an engine can serve the arms.

    Raises:
        EndpointError: an arm splices, and the engine doesn't.
    """
    splicing = [arm for arm in arms if arm.splices]
    if splicing and not engine.splices:
        why = engine.obstacle or "it doesn't say why"
        raise EndpointError(f"the arm {splicing[0]} needs an engine that splices: {why}")


def run_once(plan: Plan, run: Run, engine: Engine) -> RunOutcome:
    """Run a benchmark in one arm, or continue where the last attempt ended.

    Raises:
        LabError: it failed. A further attempt continues.
        OSError: a file can't be written.
    """
    folder = plan.folder(run)
    earlier = parts_of(folder)
    if plan.between:
        _run_between(plan, folder)
    key = secrets.token_urlsafe(24)
    settings = arm_settings(run.arm, plan.policy, plan.profile)
    isolation = isolation_settings(f"bench-{secrets.token_hex(8)}", key, isolates=engine.isolates)
    environment = proxy_environment(os.environ, settings | isolation)
    with running_proxy(plan.upstream, environment, key, folder / "proxy.log") as proxy:
        check_proxy(proxy, run.arm)
        job = plan.job(run, proxy.endpoint)
        _write_files(plan, job)
        with _noted(proxy, part_path(folder, len(earlier) + 1)) as note:
            for step in plan.benchmark.steps(job):
                _run_step(step, folder, proxy, note, plan.patience_s)
    outcome = RunOutcome(
        scores=with_missing(plan.benchmark.scores(folder), plan.benchmark.expected(job)),
        parts=parts_of(folder),
        engine=engine.name,
        isolated=engine.isolates or bool(plan.between),
        revision=_revision(plan.checkout) if plan.benchmark.source else None,
        settings=settings,
    )
    if outcome.account.prompt == 0:
        raise BenchmarkError(
            f"no request of the benchmark came through the proxy; see {folder / 'benchmark.log'}"
        )
    write_outcome(folder, outcome)
    return outcome


def check_proxy(proxy: Proxy, arm: OutsideArm) -> None:
    """Check that a proxy in front of the engine does what its arm says.

    Raises:
        EndpointError: the arm splices, and the proxy can't.
    """
    reported = proxy.engine() or {}
    if arm.splices and not reported.get("splices"):
        why = reported.get("obstacle") or "it doesn't say why"
        raise EndpointError(f"the proxy of the arm {arm} can't splice: {why}")


def _claim(plan: Plan) -> None:
    """Take an output folder for a plan, or check that it belongs to it."""
    path = plan.out / "plan.json"
    document = plan.document()
    if not path.exists():
        write_whole(path, json.dumps(document, indent=2) + "\n")
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        differing = [name for name in document if found.get(name) != document[name]]
    except (ValueError, AttributeError) as error:
        raise PlanError(f"{path} can't be read; choose another --out") from error
    if differing:
        raise PlanError(
            f"{plan.out} has figures of another plan ({', '.join(differing)}); choose another --out"
        )


def _finished(plan: Plan, run: Run) -> RunOutcome | None:
    """Return the outcome of a run that is finished, or None. Raises PlanError or ResultError."""
    outcome = outcome_of(plan.folder(run))
    if outcome is not None and outcome.settings != arm_settings(run.arm, plan.policy, plan.profile):
        raise PlanError(
            f"{plan.folder(run)} was run with other settings of {run.arm}; choose another --out"
        )
    return outcome


def _run_between(plan: Plan, folder: Path) -> None:
    log = folder / "between.log"
    environment = without_settings(os.environ)
    with started(plan.between, Path.cwd(), environment, log) as process:
        status = wait(process, lambda: None)
    if status != 0:
        raise BenchmarkError(
            f"the command of --between ended with status {status}: {last_line(log)}"
        )


def _write_files(plan: Plan, job: Job) -> None:
    job.results.mkdir(parents=True, exist_ok=True)
    for path, text in plan.benchmark.files(job).items():
        if text is None:
            path.mkdir(parents=True, exist_ok=True)
        else:
            write_whole(path, text)


def _run_step(
    step: Step, folder: Path, proxy: Proxy, note: Callable[[], None], patience_s: float
) -> None:
    """Run a command to its end.

    Raises:
        BenchmarkError: it ended with an error.
        EndpointError: the engine was away for too long.
    """
    log = folder / f"{step.name}.log"
    environment = benchmark_environment(os.environ, step.variables)
    watch = EngineWatch(lambda: proxy.engine() is not None, patience_s)

    def tick() -> None:
        note()
        watch.look()

    with started(step.arguments, step.cwd, environment, log) as process:
        status = wait(process, tick)
    if proxy.engine() is None:
        raise EndpointError("the engine stopped answering; run the same command again to continue")
    if status != 0:
        raise BenchmarkError(
            f"the {step.name} command ended with status {status}: {last_line(log)}; see {log}"
        )


class EngineWatch:
    """Notices that the engine is away: a benchmark may count that as failures of the model.

    Args:
        ready: returns True while the engine answers.
        patience_s: longest time in seconds that it may be away.
        now: a clock, in seconds.
    """

    def __init__(
        self,
        ready: Callable[[], bool],
        patience_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ready = ready
        self._patience_s = patience_s
        self._now = now
        self._seen = self._looked = now()

    def look(self) -> None:
        """Look once a second at most. Raises EndpointError."""
        now = self._now()
        if now - self._looked < 1:
            return
        self._looked = now
        if self._ready():
            self._seen = now
        elif now - self._seen > self._patience_s:
            raise EndpointError(
                f"the engine didn't answer for {self._patience_s:.0f} s; "
                "run the same command again to continue"
            )


@contextmanager
def _noted(proxy: Proxy, path: Path) -> Iterator[Callable[[], None]]:
    """Write the account into a part's file, again and again and at the end, however it ends."""
    began = time.monotonic()
    last = [began]

    def note() -> None:
        if time.monotonic() - last[0] >= _NOTE_S:
            write_part(path, Part(proxy.account(), time.monotonic() - began))
            last[0] = time.monotonic()

    write_part(path, Part(proxy.account(), 0.0))
    try:
        yield note
    finally:
        if proxy.running():
            write_part(path, Part(proxy.account(), time.monotonic() - began, ended=True))


def _revision(checkout: Path) -> str | None:
    git = shutil.which("git")
    if git is None:
        return None
    answer = subprocess.run(
        [git, "-C", str(checkout), "rev-parse", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    return answer.stdout.strip() or None
