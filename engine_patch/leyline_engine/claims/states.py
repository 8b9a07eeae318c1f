"""The lifecycle of a claim as one table. What isn't in the table can't happen. Pure.

The diagram in ``docs/claims.md`` is :func:`diagram`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from leyline_engine.contract import ClaimState as State

__all__ = ["FINAL", "TRANSITIONS", "Facts", "Guard", "State", "Transition", "Trigger", "advance"]


class Trigger(StrEnum):
    """What happens to a claim."""

    ENTER = "enter"
    REFUSE = "refuse"
    SEEK = "seek"
    """The engine has looked which of the tokens are resident."""
    UNLOCK = "unlock"
    EVICT = "evict"
    LOSE = "lose"
    """Slots went by no decision of the cache: a forget, a pool reset, a device fault."""
    MOVE = "move"
    """An edit of the session put the tokens elsewhere; the predicate holds if any are left."""
    REVISE = "revise"
    RELEASE = "release"
    EXPIRE = "expire"


@dataclass(frozen=True, slots=True)
class Facts:
    """What guards ask about, as it is after the trigger."""

    holds: bool = True
    """Whether enough of the predicate's tokens are resident."""
    protected: bool = False
    """Whether the claim's tokens were locked when it happened."""


class Guard(StrEnum):
    """A condition on :class:`Facts`."""

    ALWAYS = ""
    HOLDS = "predicate holds"
    FAILS = "predicate fails"
    GAVE_WAY = "predicate fails, not locked"
    LOCKED = "locked"

    def admits(self, facts: Facts) -> bool:
        """Whether the condition is met."""
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
        # No line for a locked claim whose tokens are evicted: an engine that does it is broken.
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
    """Something happened to a claim that the table doesn't know; nothing was changed."""

    def __init__(self, state: State, trigger: Trigger, facts: Facts) -> None:
        says = f"{'holds' if facts.holds else 'fails'}, {'' if facts.protected else 'not '}locked"
        super().__init__(f"a claim that is {state} can't take {trigger} (predicate {says})")
        self.state = state
        self.trigger = trigger


def advance(state: State, trigger: Trigger, facts: Facts) -> State:
    """The state after a trigger.

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
    """The table as a Mermaid state diagram, without the fence."""
    lines = ["stateDiagram-v2", f"    [*] --> {State.REQUESTED}"]
    for row in TRANSITIONS:
        guard = f" [{row.guard}]" if row.guard else ""
        lines.append(f"    {row.state} --> {row.target}: {row.trigger}{guard}")
    lines += [f"    {state} --> [*]" for state in State if state in FINAL]
    return "\n".join(lines)
