"""Traces with one fault: an event dropped, or two swapped of which one depends on the other. Pure.

A reader that gives a mutant the original's verdict hasn't looked at the events.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import msgspec

from leyline_engine.claims import events as ev

Thing = tuple[str | int, ...]
"""A thing that an event reads or writes; a prefix includes all that begins with it."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A faulty trace, numbered again."""

    name: str
    events: tuple[ev.AnyEvent, ...]


def mutants(events: Sequence[ev.AnyEvent]) -> Iterator[Mutant]:
    """Yield the trace without each event, and with each two differing, dependent events swapped."""
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
    """Return True if the order of two events matters: one writes what the other reads or writes."""
    first_writes, second_writes = _writes(first), _writes(second)
    return (
        _meet(first_writes, [*_reads(second), *second_writes])
        or _meet(second_writes, _reads(first))
        or _overlap(_written_pages(first), [*_read_pages(second), *_written_pages(second)])
        or _overlap(_written_pages(second), _read_pages(first))
    )


def _meet(some: Sequence[Thing], others: Sequence[Thing]) -> bool:
    return any(one[: len(other)] == other[: len(one)] for one in some for other in others)


def _overlap(some: Sequence[ev.Run], others: Sequence[ev.Run]) -> bool:
    return any(
        one.source == other.source and one.start < other.end and other.start < one.end
        for one in some
        for other in others
    )


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
    return things


def _reads(event: ev.AnyEvent) -> list[Thing]:
    things: list[Thing] = []
    match event:
        case ev.Expired():
            things.append(("clock",))
        case ev.Entered() if event.deadline_ms is not None:
            things.append(("clock",))
        case ev.Evicted():
            things.append(("held",))  # the holders of pages affect which ones are evicted
        case ev.RequestRefused():
            things += [("held", *key) for key in event.blocking]
    return things


def _written_pages(event: ev.AnyEvent) -> Sequence[ev.Run]:
    match event:
        case ev.Evicted() | ev.Retained() | ev.Lost():
            return event.runs
        case _:
            return ()


def _read_pages(event: ev.AnyEvent) -> Sequence[ev.Run]:
    match event:
        case ev.Found() | ev.Locked() | ev.Ranked() | ev.Unlocked() | ev.Unranked():
            return event.runs
        case ev.Matched():
            return event.runs
        case _:
            return ()


def _renumbered(events: Sequence[ev.AnyEvent]) -> tuple[ev.AnyEvent, ...]:
    return tuple(
        msgspec.structs.replace(event, seq=number) for number, event in enumerate(events, 1)
    )


def _name(event: ev.AnyEvent) -> str:
    return f"{event.seq} {type(event).__name__}"
