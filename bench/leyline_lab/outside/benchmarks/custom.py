"""A benchmark of the user's: any command that talks to ``OPENAI_BASE_URL``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec

from ...errors import ResultError
from ..tasks import Scores, TaskScore
from .base import Job, Source, Step
from .complexity_trap import ComplexityTrap
from .debug_gym import DebugGym
from .loca_bench import LocaBench

_LINES = "results.jsonl"


class ResultFormat(StrEnum):
    """Formats of result files that a command may write."""

    LINES = "lines"
    """``results.jsonl``: a line ``{"task": ID, "solved": true}`` per task."""
    COMPLEXITY_TRAP = "complexity-trap"
    LOCA_BENCH = "loca-bench"
    DEBUG_GYM = "debug-gym"


class _Line(msgspec.Struct):
    task: str
    solved: bool
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Custom:
    """A command, run in the current folder with what it needs in its environment.

    ``OPENAI_BASE_URL``, ``OPENAI_API_KEY``, ``BENCH_MODEL``, ``BENCH_FOLDER`` (to write results
    into), ``BENCH_TASKS`` (``all``, a number or ids) and ``BENCH_RUN`` (the repeat, from 1).
    """

    command: tuple[str, ...]
    format: ResultFormat = ResultFormat.LINES

    name = "custom"
    source: Source | None = None
    policy = "truncate_older_than:n=2,max_chars=200"
    needs_docker = False

    def install(self, checkout: Path) -> tuple[str, ...]:
        """Return nothing: the command is there."""
        del checkout
        return ()

    def expected(self, job: Job) -> tuple[str, ...]:
        """Return the ids that the user named."""
        return job.selection.ids

    def files(self, job: Job) -> Mapping[Path, str | None]:
        """Return nothing to write."""
        del job
        return {}

    def steps(self, job: Job) -> tuple[Step, ...]:
        """Return the command."""
        variables = {
            **job.endpoint.variables(),
            "BENCH_MODEL": job.model,
            "BENCH_FOLDER": str(job.folder),
            "BENCH_TASKS": str(job.selection),
            "BENCH_RUN": str(job.number),
        }
        return (Step("benchmark", (*self.command, *job.extra), job.checkout, variables),)

    def scores(self, folder: Path) -> Scores:
        """Return the scores in the format that the command writes."""
        match self.format:
            case ResultFormat.LINES:
                return lines_of(folder / _LINES)
            case ResultFormat.COMPLEXITY_TRAP:
                return ComplexityTrap().scores(folder)
            case ResultFormat.LOCA_BENCH:
                return LocaBench().scores(folder)
            case ResultFormat.DEBUG_GYM:
                return DebugGym().scores(folder)


def lines_of(path: Path) -> dict[str, TaskScore]:
    """Return the scores of a file of lines; of a task with several lines, the last one counts.

    Raises:
        ResultError: there is no such file, no line, or one of another form.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ResultError(f"{path} can't be read: {error.strerror}") from error
    scores: dict[str, TaskScore] = {}
    for number, line in enumerate(lines, 1):
        try:
            found = msgspec.json.decode(line, type=_Line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ResultError(f"line {number} of {path} isn't in the known format") from error
        scores[found.task] = TaskScore(found.solved, found.failed)
    if not scores:
        raise ResultError(f"{path} has no line")
    return scores
