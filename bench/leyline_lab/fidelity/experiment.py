"""The interface of an experiment: cases that are measured one by one, and the table they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import msgspec

from leyline_engine.contract import FidelityProfile

Cell = str | int | float | None
"""A value of a table; None is not measured."""

Record = Mapping[str, Cell]
"""The measurements of one case, by name; numbers that JSON can hold."""


class Scale(StrEnum):
    """The number of cases."""

    QUICK = "quick"
    """Enough to see that everything runs: a minute or two in all."""
    FULL = "full"
    """Enough for the intervals of a report."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean or a share, with its two-sided 95 % interval; both in the unit of the values."""

    value: float
    low: float
    high: float
    count: int
    """Number of cases behind it."""


class ResultTable(msgspec.Struct, frozen=True, kw_only=True):
    """One table of the report."""

    title: str
    question: str
    """The question that it answers, as a sentence."""
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    finding: str
    """The answer in words, with its figures."""
    paper: str = ""
    """The paper's figures of the same test, with their place in it; empty if it has none."""
    chart: Chart | None = None
    profiles: tuple[FidelityProfile, ...] = ()
    """Settings that it recommends."""


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """Lines or bars of a table's figures."""

    kind: str
    """``bar`` or ``line``."""
    x_label: str
    y_label: str
    x: tuple[Cell, ...]
    series: dict[str, tuple[float | None, ...]]
    """Values by the series' name, one for each of ``x``."""


class Experiment(Protocol):
    """Cases of one kind. Its constructor takes what it measures; nothing runs before it is asked.

    A case's measurements depend on its name alone, so an interrupted run continues where it ended.
    """

    name: str
    """Key of its table in the report: lower case, words joined by ``_``."""
    title: str

    def cases(self, scale: Scale) -> Sequence[str]:
        """Return the names of its cases, in order; those of ``quick`` are also in ``full``."""

    def measure(self, case: str) -> Record:
        """Measure one case."""

    def table(self, records: Mapping[str, Record]) -> ResultTable:
        """Return the table of the cases that were measured."""
