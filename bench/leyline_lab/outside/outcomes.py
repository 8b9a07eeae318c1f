"""The files that a run leaves in its folder: its parts, and its outcome once it is finished."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from ..errors import ResultError
from ..files import write_whole
from .accounts import Account
from .tasks import TaskScore

_RUN = "run.json"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Part:
    """The time from a start of a run to its end or interruption."""

    account: Account
    wall_s: float
    ended: bool = False
    """False if the counts may lack the last seconds, because the command was killed."""


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """A finished run."""

    scores: dict[str, TaskScore]
    parts: tuple[Part, ...]
    engine: str = "unknown"
    isolated: bool = False
    """True if the run found no KV of another run."""
    revision: str | None = None
    """Commit of the checkout, if it has one."""
    settings: dict[str, str] = field(default_factory=dict)
    """The arm's settings of the proxy."""

    @property
    def account(self) -> Account:
        """The counts of all parts."""
        return sum((part.account for part in self.parts), Account())

    @property
    def wall_s(self) -> float:
        """Seconds of all parts."""
        return sum(part.wall_s for part in self.parts)


def part_path(folder: Path, number: int) -> Path:
    """Return the file of a part, counted from 1."""
    return folder / f"part-{number}.json"


def write_part(path: Path, part: Part) -> None:
    """Write a part. Raises OSError."""
    write_whole(path, _text(part))


def parts_of(folder: Path) -> tuple[Part, ...]:
    """Return the parts of a run, in order.

    Raises:
        ResultError: one can't be read.
    """
    found: list[Part] = []
    while (path := part_path(folder, len(found) + 1)).exists():
        found.append(_read(path, Part))
    return tuple(found)


def write_outcome(folder: Path, outcome: RunOutcome) -> None:
    """Write a finished run. Raises OSError."""
    write_whole(folder / _RUN, _text(outcome))


def outcome_of(folder: Path) -> RunOutcome | None:
    """Return the finished run of a folder, or None if it isn't finished.

    Raises:
        ResultError: its file can't be read.
    """
    path = folder / _RUN
    return _read(path, RunOutcome) if path.exists() else None


def _text(value: Part | RunOutcome) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n"


def _read(path: Path, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        raise ResultError(f"{path} can't be read; delete its folder to run that again") from error
