"""Reading of logs: their files, their integrity, their records."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .chain import AuditKey, read_line
from .check import AuditFinding, Checked, broken_at_end, check_file, lines_of
from .files import beside, read_head, rotated

_TORN_LOOKS = 3
"""A writer may be half-way through a line."""

_LEFT = re.compile(r"(.+\.jsonl)(\.head|\.\d{6,})?")
"""Name of a log's file, or of a file beside it."""

_ROTATED_LOOKS = 5
"""A writer may also begin another file."""


class LogNotFoundError(ValueError):
    """There is no log at the given place."""


class KeyNeededError(ValueError):
    """The log is sealed with a key that wasn't given."""


@dataclass(frozen=True, slots=True)
class LogFiles:
    """The files of one log."""

    path: Path
    files: tuple[Path, ...]
    """Oldest first."""
    whole: bool
    """True if they are all existing files, including the current one."""


@dataclass(frozen=True, slots=True)
class AuditVerdict:
    """The result of checking one log."""

    path: Path
    checked: Checked
    finding: AuditFinding | None
    file: Path | None
    """The file with the first bad line."""

    @property
    def good(self) -> bool:
        return self.finding is None


def find_logs(path: Path) -> list[LogFiles]:
    """Return the logs at ``path``: a file with those before it, or all ``*.jsonl`` in a folder.

    A log of which only earlier files, or a saved head, are left is one, too.

    Raises:
        LogNotFoundError: there are none.
    """
    if path.is_dir():
        left = (_LEFT.fullmatch(each.name) for each in path.iterdir())
        names = sorted({path / each[1] for each in left if each is not None})
        if not names:
            raise LogNotFoundError(f"there is no *.jsonl in {path}")
        return [found for name in names for found in find_logs(name)]
    base = path.with_suffix("")
    if path.suffix[1:].isdigit() and len(path.suffix) > 6 and path in rotated(base).values():
        return [LogFiles(path, (path,), whole=False)]
    earlier = tuple(rotated(path).values())
    if not path.is_file() and not earlier and not beside(path, ".head").is_file():
        raise LogNotFoundError(f"there is no audit log at {path}")
    return [LogFiles(path, (*earlier, path) if path.is_file() else earlier, whole=True)]


def verify(log: LogFiles, keys: Sequence[AuditKey] = (), head: str | None = None) -> AuditVerdict:
    """Check one log.

    Args:
        head: hash of a record that must be in it; the saved head counts, too.

    Raises:
        KeyNeededError: the log has a key, and none was given.
        OSError: a file can't be read.
    """
    for _ in range(_ROTATED_LOOKS):
        try:
            verdict = _verified(log, keys, head)
        except FileNotFoundError:
            verdict = None
        found = _now(log)
        if found.files == log.files and verdict is not None:
            return verdict
        log = found  # it was rotated while being read
    return _verified(log, keys, head)


def _now(log: LogFiles) -> LogFiles:
    """Return the log with its current files."""
    try:
        return find_logs(log.path)[0] if log.whole else log
    except LogNotFoundError:
        return log


def _verified(log: LogFiles, keys: Sequence[AuditKey], head: str | None) -> AuditVerdict:
    checked = Checked()
    saved = read_head(log.path) if log.whole else None
    checked.wanted = {each for each in (head, saved.hash if saved else None) if each}
    for file in log.files:
        data = _settled(file)
        if not keys:
            _refuse_keyed(data, file)
        check_file(data, checked, keys)
        if checked.finding is not None:
            return AuditVerdict(log.path, checked, checked.finding, file)
    finding = _pruned_more(log, checked) or broken_at_end(checked)
    last = log.files[-1] if log.files else None
    return AuditVerdict(log.path, checked, finding, last if finding else None)


def records(log: LogFiles) -> Iterator[dict[str, Any]]:
    """Yield all records of a log, oldest first."""
    for file in log.files:
        yield from lines_of(file.read_bytes())


def _settled(file: Path) -> bytes:
    data = file.read_bytes()
    for _ in range(_TORN_LOOKS):
        if not data or data.endswith(b"\n"):
            break
        time.sleep(0.05)
        data = file.read_bytes()
    return data


def _refuse_keyed(data: bytes, file: Path) -> None:
    line = read_line(data.partition(b"\n")[0])
    if line is not None and line.key is not None:
        raise KeyNeededError(f"{file} is sealed with the key {line.key}; give it with --key-file")


def _pruned_more(log: LogFiles, checked: Checked) -> AuditFinding | None:
    """Return a finding if files are gone that the log reports as kept."""
    if not log.whole or checked.oldest is None:
        return None
    first = min(rotated(log.path), default=0)
    # Names can be changed; the first file itself says which one came before.
    if first and max(first, checked.before + 1) <= checked.oldest:
        return None
    return AuditFinding("removed", 1, f"earlier files are gone, from number {checked.oldest} on")
