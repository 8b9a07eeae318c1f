"""The lifecycle: one table, the diagram drawn from it, and no way around it."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from leyline_engine.claims.states import (
    FINAL,
    TRANSITIONS,
    Facts,
    State,
    TransitionError,
    Trigger,
    advance,
    diagram,
)

DOCS = Path(__file__).resolve().parents[4] / "docs" / "claims.md"
ALL_FACTS = [Facts(holds, protected) for holds, protected in product((True, False), repeat=2)]


def test_the_documented_diagram_is_the_table() -> None:
    """docs/claims.md shows what the code does, to the letter."""
    text = DOCS.read_text(encoding="utf-8")
    shown = text.partition("<!-- states -->")[2].partition("<!-- end of states -->")[0]
    assert shown.strip() == f"```mermaid\n{diagram()}\n```"


def test_the_diagram_has_every_line_of_the_table_and_every_end() -> None:
    """One arrow per transition, one into the first state, one out of each final state."""
    arrows = [line for line in diagram().splitlines() if "-->" in line]
    assert len(arrows) == len(set(arrows)) == len(TRANSITIONS) + 1 + len(FINAL)


def test_at_most_one_line_applies() -> None:
    """The table never leaves a choice, whatever the facts."""
    for state, trigger, facts in product(State, Trigger, ALL_FACTS):
        targets = [
            row.target
            for row in TRANSITIONS
            if (row.state, row.trigger) == (state, trigger) and row.guard.admits(facts)
        ]
        assert len(targets) <= 1
        if targets:
            assert advance(state, trigger, facts) is targets[0]
        else:
            with pytest.raises(TransitionError, match=f"{state} can't take {trigger}"):
                advance(state, trigger, facts)


def test_final_states_are_those_of_the_contract() -> None:
    """Each can be reached, and nothing leaves it."""
    assert {state.value for state in FINAL} == {
        "rejected",
        "materialization_failed",
        "evicted",
        "expired",
        "released",
        "harmed",
    }
    reached = {State.REQUESTED}
    while more := {row.target for row in TRANSITIONS if row.state in reached} - reached:
        reached |= more
    assert reached == set(State)


@pytest.mark.parametrize("holds", [True, False])
def test_a_live_claim_can_always_end(holds: bool) -> None:
    """Release and expiry have no guard in any live state."""
    for state in set(State) - FINAL - {State.REQUESTED}:
        for protected in (True, False):
            facts = Facts(holds, protected)
            assert advance(state, Trigger.RELEASE, facts) is State.RELEASED
            assert advance(state, Trigger.EXPIRE, facts) is State.EXPIRED


def test_a_locked_claim_is_never_evicted() -> None:
    """The engine that tries is stopped; losing pages to a fault is harm instead."""
    locked = Facts(holds=False, protected=True)
    with pytest.raises(TransitionError):
        advance(State.MATERIALIZED, Trigger.EVICT, locked)
    assert advance(State.MATERIALIZED, Trigger.LOSE, locked) is State.HARMED
