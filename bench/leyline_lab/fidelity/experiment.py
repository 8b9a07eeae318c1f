"""The interface of an experiment, and the sessions that experiments receive. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, TypeVar

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


_Item = TypeVar("_Item")

LENGTHS = {Scale.QUICK: 16, Scale.FULL: 128}
"""Tokens that are decoded for each answer, by scale."""

ChatMessages = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class SessionStep:
    """One request of a session."""

    messages: ChatMessages
    """The whole history, as the agent sends it."""
    edited: ChatMessages
    """The same after the policy; as many messages."""
    tools: tuple[Mapping[str, Any], ...] = ()

    @property
    def edits(self) -> int:
        """Number of messages that the policy changed."""
        return sum(map(_differ, self.messages, self.edited))


@dataclass(frozen=True, slots=True)
class EvaluationSessions:
    """The sessions that trajectories replay."""

    recorded: tuple[SessionStep, ...]
    """A recorded agent session."""
    recall: tuple[SessionStep, ...]
    """A generated session of the recall task."""


def spread(items: Sequence[_Item], count: int) -> tuple[_Item, ...]:
    """Return ``count`` items at even distances, the first and the last included; all if fewer."""
    if len(items) <= count:
        return tuple(items)
    if count == 1:
        return (items[len(items) // 2],)
    last = len(items) - 1
    return tuple(items[round(index * last / (count - 1))] for index in range(count))


def _differ(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one is not other and one != other
