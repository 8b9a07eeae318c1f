"""Gates: when the committed part of a conversation grows, for policies that wait (`compose`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from leyline_policies.context import Context
from leyline_policies.policy import Message
from leyline_policies.triggers import Trigger


class Gate(Protocol):
    """The condition under which the committed part may grow."""

    def opens(self, messages: Sequence[Message], context: Context, gain: Callable[[], int]) -> bool:
        """Return True to commit all messages.

        Args:
            messages: the messages that would be sent if not.
            gain: the number of tokens it would reclaim.
        """


@dataclass(frozen=True, slots=True)
class _OnTrigger:
    trigger: Trigger

    def opens(self, messages: Sequence[Message], context: Context, gain: Callable[[], int]) -> bool:
        return self.trigger.fires(messages, context)


@dataclass(frozen=True, slots=True)
class _EveryTurns:
    turns: int

    def opens(self, messages: Sequence[Message], context: Context, gain: Callable[[], int]) -> bool:
        since = context.state.get("turn")
        return since is None or context.turn - since >= self.turns


@dataclass(frozen=True, slots=True)
class _Reclaims:
    tokens: int

    def opens(self, messages: Sequence[Message], context: Context, gain: Callable[[], int]) -> bool:
        return gain() >= self.tokens


@dataclass(frozen=True, slots=True)
class _Together:
    gates: tuple[Gate, ...]

    def opens(self, messages: Sequence[Message], context: Context, gain: Callable[[], int]) -> bool:
        return all(gate.opens(messages, context, gain) for gate in self.gates)


def when_gate(trigger: Trigger) -> Gate:
    """Return a gate that opens while ``trigger`` holds."""
    return _OnTrigger(trigger)


def every_gate(turns: int) -> Gate:
    """Return a gate that opens ``turns`` turns after it opened last.

    Raises:
        ValueError: fewer than one turn.
    """
    if turns < 1:
        raise ValueError(f"every={turns}: it must be 1 turn or more")
    return _EveryTurns(turns)


def at_least_gate(tokens: int) -> Gate:
    """Return a gate that opens when a commit would reclaim this many tokens.

    Raises:
        ValueError: fewer than one token.
    """
    if tokens < 1:
        raise ValueError(f"at_least={tokens}: it must be 1 token or more")
    return _Reclaims(tokens)


def all_of(gates: Sequence[Gate]) -> Gate:
    """Return a gate that opens when all of them would."""
    return _Together(tuple(gates))
