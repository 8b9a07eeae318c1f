"""Measured cases in a file beside the report, so that an interrupted run continues."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import msgspec

from leyline_lab.fidelity.experiment import Experiment, Record, Scale

from ..errors import JournalError


class Journal:
    """Records of one run, by experiment and case. One line of JSON each, appended at once.

    Args:
        path: the file; a torn last line, as of a killed run, is dropped.
        identity: what the records depend on, such as the model's fingerprint.

    Raises:
        JournalError: the file is another run's, or isn't a journal.
    """

    def __init__(self, path: Path, identity: Mapping[str, str]) -> None:
        self._path = path
        self.records: dict[str, dict[str, Record]] = {}
        lines = self._read()
        header = {"identity": dict(identity)}
        if lines and lines[0] != header:
            raise JournalError(
                f"{path} holds cases of another model, engine or version: "
                "remove it, or give another --json"
            )
        for line in lines[1:]:
            self._note(line)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[str] = path.open("a", encoding="utf-8")
            if not lines:
                self._write(header)
        except OSError as error:
            raise JournalError(f"{path} can't be written: {error.strerror}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def of(self, experiment: str) -> Mapping[str, Record]:
        """Return the measured cases of an experiment."""
        return self.records.get(experiment, {})

    def add(self, experiment: str, case: str, record: Record) -> None:
        """Add a measured case.

        Raises:
            JournalError: it can't be written, as on a full disk; the cases before it are safe.
        """
        line = {"experiment": experiment, "case": case, "record": dict(record)}
        try:
            self._write(line)
        except OSError as error:
            raise JournalError(
                f"{self._path} can't be written: {error.strerror}; run the same command again to "
                "continue after the cases that it has"
            ) from error
        self._note(line)

    def remove(self) -> None:
        """Remove the file: the report has everything."""
        self._file.close()
        self._path.unlink(missing_ok=True)

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def _note(self, line: Mapping[str, Any]) -> None:
        try:
            cases = self.records.setdefault(line["experiment"], {})
            cases[line["case"]] = line["record"]
        except (KeyError, TypeError) as error:
            raise JournalError(f"{self._path} isn't a journal: remove it") from error

    def _read(self) -> list[dict[str, Any]]:
        """Return the file's whole lines; cut off what follows them."""
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise JournalError(f"{self._path} can't be read: {error.strerror}") from error
        whole = content[: content.rfind(b"\n") + 1]
        try:
            if len(whole) < len(content):
                os.truncate(self._path, len(whole))
            lines = [json.loads(line) for line in whole.splitlines()]
        except (ValueError, OSError) as error:
            raise JournalError(f"{self._path} isn't a journal: remove it") from error
        return lines


def count_left(experiments: Sequence[Experiment], journal: Journal, scale: Scale) -> int:
    """Return how many cases aren't measured yet."""
    return sum(
        case not in journal.of(each.name) for each in experiments for case in each.cases(scale)
    )


def measure_all(
    experiments: Sequence[Experiment],
    journal: Journal,
    scale: Scale,
    advance: Callable[[str], None],
) -> dict[str, Any]:
    """Measure what the journal lacks, and return all tables by name, as JSON.

    Args:
        advance: called with the experiment's title after each case.
    """
    tables: dict[str, Any] = {}
    for each in experiments:
        cases = each.cases(scale)
        for case in cases:
            if case not in journal.of(each.name):
                journal.add(each.name, case, each.measure(case))
                advance(each.title)
        known = journal.of(each.name)
        tables[each.name] = msgspec.to_builtins(each.table({case: known[case] for case in cases}))
    return tables
