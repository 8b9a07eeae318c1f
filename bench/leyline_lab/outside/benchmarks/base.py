"""The interface of a benchmark, and readers of result files that several have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from ...errors import MissingError, ResultError
from ..tasks import Scores, Selection

_T = TypeVar("_T")
_MOST_BYTES = 1024 * 1024 * 1024

RESULTS = "results"
"""Folder of a run into which the benchmark writes."""


@dataclass(frozen=True, slots=True)
class Source:
    """A published benchmark at the commit whose commands and files the harness knows."""

    repository: str
    commit: str
    marker: str
    """A file of the checkout."""
    program: str
    """The program of the checkout's own environment that runs the benchmark."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The proxy of an arm, as the benchmark sees it."""

    base_url: str
    """Ends with ``/v1``."""
    api_key: str

    def variables(self) -> dict[str, str]:
        """Return the variables that OpenAI clients read, and no way around the proxy."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
        }


@dataclass(frozen=True, slots=True)
class Job:
    """One run of a benchmark in one arm."""

    endpoint: Endpoint
    model: str
    folder: Path
    """Absolute; everything of this run is below it."""
    selection: Selection = field(default_factory=Selection)
    workers: int = 1
    config: str | None = None
    """Configuration file of the benchmark, relative to its checkout; None is its usual one."""
    extra: tuple[str, ...] = ()
    """Arguments appended to the benchmark's command."""
    checkout: Path = Path()
    tokenizer: str | None = None
    number: int = 1
    """Number of the repeat, from 1."""

    @property
    def results(self) -> Path:
        """The folder into which the benchmark writes."""
        return self.folder / RESULTS

    def program(self, name: str) -> str:
        """Return the path of a program in the checkout's own environment."""
        return str(self.checkout / ".venv" / "bin" / name)


@dataclass(frozen=True, slots=True)
class Step:
    """A command of a run."""

    name: str
    arguments: tuple[str, ...]
    cwd: Path
    variables: Mapping[str, str] = field(default_factory=dict)


class Benchmark(Protocol):
    """A benchmark: its commands, its files and its result format."""

    @property
    def name(self) -> str:
        """Name on the command line."""

    @property
    def source(self) -> Source | None:
        """Its repository; None for a command of the user's."""

    @property
    def policy(self) -> str:
        """The policy that the arms use unless the user names one."""

    @property
    def needs_docker(self) -> bool:
        """True if its tasks run in containers."""

    def install(self, checkout: Path) -> tuple[str, ...]:
        """Return the shell lines that make a checkout ready, in order."""

    def expected(self, job: Job) -> tuple[str, ...]:
        """Return the ids of the selected tasks; empty if only the results show them.

        Raises:
            PlanError: it has no such task.
            MissingError: a file of the checkout that lists them isn't there.
        """

    def files(self, job: Job) -> Mapping[Path, str | None]:
        """Return the files to write before the steps; None is a folder. Raises as ``expected``."""

    def steps(self, job: Job) -> tuple[Step, ...]:
        """Return the commands, in order. Run again, they continue with what isn't finished."""

    def scores(self, folder: Path) -> Scores:
        """Return the scores in the files of a run.

        Raises:
            ResultError: there are none, or they have another format.
        """


def decoded(path: Path, kind: type[_T]) -> _T:
    """Return the members of a JSON file that ``kind`` names; others are skipped.

    Raises:
        ResultError: it isn't there, is over 1 GiB, or has another form.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ResultError(f"{path} is larger than 1 GiB")
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise ResultError(f"{path} can't be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ResultError(f"{path} isn't in the known format: {error}") from error


def check_checkout(benchmark: Benchmark, checkout: Path | None) -> Path:
    """Return the absolute path of a checkout that is ready to run.

    Raises:
        MissingError: there is none, or it isn't installed; names the command that shows how.
    """
    source = benchmark.source
    if source is None:
        return Path.cwd()
    how = f"--benchmark {benchmark.name} --dry-run prints the commands that install it"
    if checkout is None:
        raise MissingError(f"name the folder of {benchmark.name}: --checkout DIR; {how}")
    if not (checkout / source.marker).is_file():
        raise MissingError(f"{checkout} is no checkout of {source.repository}; {how}")
    if not (checkout / ".venv" / "bin" / source.program).exists():
        raise MissingError(f"{checkout} isn't installed: .venv has no {source.program}; {how}")
    return checkout.resolve()
