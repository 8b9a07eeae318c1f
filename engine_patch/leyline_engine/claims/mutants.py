"""Traces with one fault: an event dropped, or two swapped of which one depends on the other. Pure.

A reader that calls a mutant by the original's verdict hasn't looked at the events.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import msgspec

from . import events as ev

Thing = tuple[str | int, ...]
"""What an event reads or writes; a prefix stands for all that begins with it."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A faulty trace, numbered anew."""

    name: str
    events: tuple[ev.AnyEvent, ...]


def mutants(events: Sequence[ev.AnyEvent]) -> Iterator[Mutant]:
    """Every event dropped; every two that depend on one another, and differ, swapped."""
    for index, event in enumerate(events):
        rest = [*events[:index], *events[index + 1 :]]
        yield Mutant(f"without {_name(event)}", _renumbered(rest))
    for first, second in combinations(range(len(events)), 2):
        same = msgspec.structs.replace(events[first], seq=events[second].seq) == events[second]
        if not same and dependent(events[first], events[second]):
            order = list(events)
            order[first], order[second] = order[second], order[first]
            name = f"{_name(events[first])} and {_name(events[second])} swapped"
            yield Mutant(name, _renumbered(order))


def dependent(first: ev.AnyEvent, second: ev.AnyEvent) -> bool:
    """Whether the order of two events matters: one writes what the other reads or writes."""
    first_writes, second_writes = _writes(first), _writes(second)
    return _meet(first_writes, [*_reads(second), *second_writes]) or _meet(
        second_writes, _reads(first)
    )


def _meet(some: Sequence[Thing], others: Sequence[Thing]) -> bool:
    return any(one[: len(other)] == other[: len(one)] for one in some for other in others)


def _writes(event: ev.AnyEvent) -> list[Thing]:
    things: list[Thing] = []
    if isinstance(event, ev.ClaimEvent):
        things.append(("claim", event.tenant, event.claim))
    if name := getattr(event, "request", None):
        things.append(("request", name))
    if hasattr(event, "free"):
        things.append(("pool",))
    match event:
        case ev.Opened():
            things.append(())
        case ev.Ticked():
            things.append(("clock",))
        case ev.Locked() | ev.Ranked() | ev.Unlocked() | ev.Unranked():
            things.append(("held", event.tenant, event.claim))
        case ev.Evicted() | ev.Retained() | ev.Lost():
            things += _pages(event.runs)
    return things


def _reads(event: ev.AnyEvent) -> list[Thing]:
    things: list[Thing] = []
    match event:
        case ev.Expired():
            things.append(("clock",))
        case ev.Entered() if event.deadline_ms is not None:
            things.append(("clock",))
        case ev.Found() | ev.Locked() | ev.Ranked() | ev.Unlocked() | ev.Unranked():
            things += _pages(event.runs)
        case ev.Evicted():
            things.append(("held",))  # whoever holds pages has a say in which ones go
        case ev.RequestRefused():
            things += [("held", *key) for key in event.blocking]
        case ev.Matched():
            things += _pages([event.run])
    return things


def _pages(runs: Iterable[ev.Run]) -> list[Thing]:
    return [("page", run.source, page) for run in runs for page in range(run.start, run.end)]


def _renumbered(events: Sequence[ev.AnyEvent]) -> tuple[ev.AnyEvent, ...]:
    return tuple(
        msgspec.structs.replace(event, seq=number) for number, event in enumerate(events, 1)
    )


def _name(event: ev.AnyEvent) -> str:
    return f"{event.seq} {type(event).__name__}"
