"""Rules of what an engine keeps of a session, and the tokens that its turns then prefill."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from leyline_engine.admit.anchors import Anchors, StateTerms
from leyline_engine.admit.plan import Plan

from .recorded import Turn
from .slots import Eviction, StateSlots

GRID, CHUNK, DECODED = 64, 8192, 256
"""SGLang's defaults, in tokens: a forward leaves an anchor at a multiple of the first from its
start, a prefill is cut into forwards of the second, decoding leaves one at multiples of the
third."""


class Choice(StrEnum):
    """The place of a forward's anchor."""

    END = "end"
    """The last place of its grid."""
    FIRST = "first boundary"
    """The last place in front of the first message that begins in it."""
    LAST = "last boundary"
    """The last place in front of the last one."""
    BOTH = "last boundary, end"
    """Two anchors: in front of the last message, and at the end."""


@dataclass(frozen=True, slots=True)
class Arm:
    """The rules by which an engine keeps state, if it does."""

    name: str
    anchored: bool = True
    """False for a model that keeps nothing but rows."""
    splices: bool = True
    carries: bool = True
    """True if anchors inside of a copied run move with it; else only the one at its end does."""
    choice: Choice = Choice.END
    decoded: int = DECODED
    """Decoding leaves an anchor at multiples of so many tokens; 1 at the answer's end."""
    gaps: int = GRID
    """Gaps in front of runs have multiples of so many tokens; 1 if their rows are copied from the
    running request, so that no anchor need be there."""
    slots: int | None = None
    eviction: Eviction = Eviction.LRU


CHOSEN: Final = Arm("last boundary, decoding 64, exact gaps", True, True, True, Choice.LAST, 64, 1)
"""The cheapest that reaches the goal without a change of SGLang's own tracking."""
ARMS: Final = (
    Arm("rows alone", anchored=False),
    Arm("native prefix", splices=False),
    Arm("ends, not carried", carries=False),
    Arm("ends"),
    Arm("first boundary", choice=Choice.FIRST),
    Arm("last boundary", choice=Choice.LAST),
    Arm("last boundary and end", choice=Choice.BOTH),
    Arm("last boundary, decoding 64", choice=Choice.LAST, decoded=64),
    CHOSEN,
    Arm("last boundary, exact ends", choice=Choice.LAST, decoded=1),
    Arm("last boundary, exact ends and gaps", choice=Choice.LAST, decoded=1, gaps=1),
)


def costs(session: Sequence[Turn], arm: Arm) -> tuple[list[int], int]:
    """Return the tokens that each turn prefills, and the largest number of states held."""
    slots, found = StateSlots(arm.slots, arm.eviction), list[int]()
    settled = 0
    for turn in session:
        if not arm.splices:
            turn = replace(turn, copies=(), sources=())  # noqa: PLW2901
        plan = _plan(turn, slots, arm)
        settled = plan.prefix if plan.copies else settled
        found.append(plan.prefilled)
        if arm.anchored:
            slots.put(turn.keys, _left(turn, plan, arm), settled)
    return found, slots.peak


def _plan(turn: Turn, slots: StateSlots, arm: Arm) -> Plan:
    """Return the product's plan for a turn with the anchors that are held."""
    if not arm.anchored:
        return turn.plan(turn.prefix)
    native = Anchors.at(slots.on(turn.keys)).last(turn.prefix)
    slots.touch(turn.keys, [native])
    sources = tuple(Anchors.at(slots.on(source)) for source in turn.sources)
    return turn.plan(native, state=StateTerms(sources, rows=turn.prefix, grid=arm.gaps))


def _left(turn: Turn, plan: Plan, arm: Arm) -> Iterator[int]:
    """Yield the positions at which a turn leaves state."""
    for step in plan.prefills:
        stage = step.end < plan.length
        for start in range(step.start, step.end, CHUNK):
            end = min(start + CHUNK, step.end)
            yield from _forward(turn, start, end, Choice.END if stage else arm.choice)
    ends = {copy.dest_end for copy in plan.copies}
    yield from (state.dest for state in plan.states if arm.carries or state.dest in ends)
    decoded = len(turn.keys) - len(turn.keys) % arm.decoded
    if decoded > turn.length:
        yield decoded


def _forward(turn: Turn, start: int, end: int, choice: Choice) -> Iterator[int]:
    """Yield the anchors of one forward."""
    last = start + (end - start) // GRID * GRID
    begun = [at for at in turn.boundaries if start + GRID <= at < last]
    if last == start:
        return
    if not begun or choice in (Choice.END, Choice.BOTH):
        yield last
    if begun and choice is not Choice.END:
        at = begun[0] if choice is Choice.FIRST else begun[-1]
        yield start + (at - start) // GRID * GRID
