"""The lifecycle of a claim as one table. A transition outside the table can't happen. Pure.

:func:`diagram` writes the diagram in ``docs/claims.md``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from leyline_engine.contract import ClaimState as State

__all__ = ["FINAL", "TRANSITIONS", "Facts", "Guard", "State", "Transition", "Trigger", "advance"]


class Trigger(StrEnum):
    """An event in a claim's life."""

    ENTER = "enter"
    REFUSE = "refuse"
    SEEK = "seek"
    """The engine has looked for the tokens that are resident."""
    UNLOCK = "unlock"
    EVICT = "evict"
    LOSE = "lose"
    """Slots are lost by no decision of the cache: a forget, a pool reset, a device fault."""
    MOVE = "move"
    """An edit of the session moved the tokens; the predicate holds if any are left."""
    REVISE = "revise"
    RELEASE = "release"
    EXPIRE = "expire"


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts that guards test, as they are after the trigger."""

    holds: bool = True
    """True if enough of the predicate's tokens are resident."""
    protected: bool = False
    """True if the claim's tokens were locked at the trigger."""


class Guard(StrEnum):
    """A condition on :class:`Facts`."""

    ALWAYS = ""
    HOLDS = "predicate holds"
    FAILS = "predicate fails"
    GAVE_WAY = "predicate fails, not locked"
    LOCKED = "locked"

    def admits(self, facts: Facts) -> bool:
        """Return True if the condition is met."""
        match self:
            case Guard.ALWAYS:
                return True
            case Guard.HOLDS:
                return facts.holds
            case Guard.FAILS:
                return not facts.holds
            case Guard.GAVE_WAY:
                return not facts.holds and not facts.protected
            case Guard.LOCKED:
                return facts.protected


@dataclass(frozen=True, slots=True)
class Transition:
    """One line of the table."""

    state: State
    trigger: Trigger
    guard: Guard
    target: State


def _rows() -> Iterator[Transition]:
    yield Transition(State.REQUESTED, Trigger.ENTER, Guard.ALWAYS, State.ACCEPTED)
    yield Transition(State.REQUESTED, Trigger.REFUSE, Guard.ALWAYS, State.REJECTED)
    yield Transition(State.ACCEPTED, Trigger.SEEK, Guard.HOLDS, State.MATERIALIZED)
    yield Transition(State.ACCEPTED, Trigger.SEEK, Guard.FAILS, State.MATERIALIZATION_FAILED)
    yield Transition(State.MATERIALIZED, Trigger.UNLOCK, Guard.LOCKED, State.DEMOTED)
    for state in (State.MATERIALIZED, State.DEMOTED):
        # No line for an eviction of a locked claim's tokens: an engine that does it is broken.
        yield Transition(state, Trigger.EVICT, Guard.GAVE_WAY, State.EVICTED)
        yield Transition(state, Trigger.EVICT, Guard.HOLDS, state)
        yield Transition(state, Trigger.LOSE, Guard.FAILS, State.HARMED)
        yield Transition(state, Trigger.LOSE, Guard.HOLDS, state)
    for state in (State.ACCEPTED, State.MATERIALIZED):
        yield Transition(state, Trigger.MOVE, Guard.HOLDS, State.ACCEPTED)
        yield Transition(state, Trigger.MOVE, Guard.FAILS, State.HARMED)
    for state in (State.ACCEPTED, State.MATERIALIZED, State.DEMOTED):
        yield Transition(state, Trigger.REVISE, Guard.ALWAYS, State.ACCEPTED)
        yield Transition(state, Trigger.RELEASE, Guard.ALWAYS, State.RELEASED)
        yield Transition(state, Trigger.EXPIRE, Guard.ALWAYS, State.EXPIRED)


TRANSITIONS: tuple[Transition, ...] = tuple(_rows())

FINAL = frozenset(State) - {transition.state for transition in TRANSITIONS}
"""States that nothing leaves."""


class TransitionError(RuntimeError):
    """The table has no line for a claim's state and trigger; nothing was changed."""

    def __init__(self, state: State, trigger: Trigger, facts: Facts) -> None:
        says = f"{'holds' if facts.holds else 'fails'}, {'' if facts.protected else 'not '}locked"
        super().__init__(f"a claim that is {state} can't take {trigger} (predicate {says})")
        self.state = state
        self.trigger = trigger


def advance(state: State, trigger: Trigger, facts: Facts) -> State:
    """Return the state after a trigger.

    Raises:
        TransitionError: no line of the table applies.
    """
    for transition in TRANSITIONS:
        if (transition.state, transition.trigger) == (state, trigger) and transition.guard.admits(
            facts
        ):
            return transition.target
    raise TransitionError(state, trigger, facts)


def diagram() -> str:
    """Return the table as a Mermaid state diagram, without the fence."""
    lines = ["stateDiagram-v2", f"    [*] --> {State.REQUESTED}"]
    for row in TRANSITIONS:
        guard = f" [{row.guard}]" if row.guard else ""
        lines.append(f"    {row.state} --> {row.target}: {row.trigger}{guard}")
    lines += [f"    {state} --> [*]" for state in State if state in FINAL]
    return "\n".join(lines)
