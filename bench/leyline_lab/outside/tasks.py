"""The tasks that a user chose, and their scores. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import PlanError

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./-]{0,199}")


@dataclass(frozen=True, slots=True)
class Selection:
    """All tasks of a benchmark, the first ``count``, or those in ``ids``."""

    count: int | None = None
    ids: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str | None) -> Selection:
        """Return the selection that ``--tasks`` means: nothing, a number, or ids.

        Raises:
            PlanError: neither a positive number nor a list of different ids.
        """
        if text is None:
            return cls()
        names = tuple(name.strip() for name in text.split(",") if name.strip())
        if len(names) == 1 and names[0].isdecimal() and int(names[0]) > 0:
            return cls(count=int(names[0]))
        wrong = next((name for name in names if not _ID.fullmatch(name)), None)
        if not names or wrong is not None or len(set(names)) != len(names):
            raise PlanError("--tasks takes a number above 0, or different ids with commas between")
        if all(name.isdecimal() for name in names):
            raise PlanError("--tasks takes one number, or ids with commas between")
        return cls(ids=names)

    def of(self, known: Sequence[str], benchmark: str) -> tuple[str, ...]:
        """Return the selected tasks of a benchmark whose tasks are known.

        Raises:
            PlanError: it has no such task.
        """
        unknown = [name for name in self.ids if name not in known]
        if unknown:
            raise PlanError(
                f"{benchmark} has no task {unknown[0]!r}; it has {', '.join(known[:3])}, "
                f"… ({len(known)})"
            )
        return self.ids or tuple(known[: self.count])

    def __str__(self) -> str:
        """Return the text that :meth:`parse` reads, or ``all``."""
        return ",".join(self.ids) or (str(self.count) if self.count else "all")


@dataclass(frozen=True, slots=True)
class TaskScore:
    """A benchmark's verdict on one task."""

    solved: bool
    failed: bool = False
    """True if the attempt ended with an error of the benchmark; it counts as not solved."""


Scores = Mapping[str, TaskScore]
"""Scores by the task's id."""


def with_missing(scores: Scores, expected: Sequence[str]) -> dict[str, TaskScore]:
    """Return the scores of the expected tasks; one without a result counts as failed.

    Without expected tasks, all scores are returned.
    """
    if not expected:
        return dict(scores)
    absent = TaskScore(solved=False, failed=True)
    return {task: scores.get(task, absent) for task in expected}
