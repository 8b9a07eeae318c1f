"""Requests of a session with and without a policy's edits, as experiments receive them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from leyline_lab.fidelity.experiment import Scale

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
