"""The reader on engines that take and evict their pages step by step."""

from __future__ import annotations

from leyline_engine.claims.events import (
    Allocated,
    AnyEvent,
    Arrived,
    EventLedger,
    Evicted,
    Freed,
    Opened,
    Retained,
    Run,
)
from leyline_lab.claims.reader import read
from leyline_lab.claims.verdict import Outcome, TraceVerdict

OLD, NEW = (Run("old", 0, 2),), (Run("new", 0, 2),)


def arrived(request: str, source: str) -> Arrived:
    """A request of two pages."""
    return Arrived(
        request=request,
        tenant="a",
        session="s",
        source=source,
        prompt=1,
        pages=2,
        write_no_admit=False,
    )


def numbered(*events: AnyEvent) -> TraceVerdict:
    """The verdict on events, numbered in this order."""
    kept: list[AnyEvent] = []
    ledger = EventLedger(sink=kept.append)
    for event in events:
        ledger.append(event)
    return read(kept)


def two_evictions(first: Run, second: Run) -> TraceVerdict:
    """A request fills the pool, and another evicts what it left in two steps."""
    return numbered(
        Opened(usable=2, page_size=1, strict=False, tree=True),
        arrived("fill", "old"),
        Allocated(request="fill", pages=2, free=0),
        Retained(request="fill", runs=OLD, path=OLD, free=0),
        Freed(request="fill", pages=0, free=0),
        arrived("active", "new"),
        Evicted(request="active", runs=(first,), free=1),
        Allocated(request="active", pages=1, free=0),
        Evicted(request="active", runs=(second,), free=1),
        Allocated(request="active", pages=1, free=0),
        Retained(request="active", runs=NEW, path=NEW, free=0),
        Freed(request="active", pages=0, free=0),
    )


def test_a_requests_later_evictions_of_a_source_are_further_ones() -> None:
    """The first is the outcome; the rest goes on from it, and says how many pages went."""
    verdict = two_evictions(Run("old", 1, 2), Run("old", 0, 1))
    assert verdict.void == ""
    (first,) = verdict.of(Outcome.ORDINARY_EVICTION)
    (later,) = verdict.of(Outcome.FURTHER_EVICTION)
    assert (first.subject, first.pages) == (later.subject, later.pages) == ("old", 1)


def test_a_tree_that_drops_a_page_before_those_after_it_contradicts_itself() -> None:
    """Nothing finds the later page any more, though the engine counts it as resident."""
    verdict = two_evictions(Run("old", 0, 1), Run("old", 1, 2))
    assert verdict.void == "event 7: a hole in a path"
