"""The reader's accounts while it replays a trace. Used by the reader alone. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from enum import StrEnum

from leyline_engine.claims import events as ev

from .verdict import Balance

Page = tuple[str, int]
Key = tuple[str, str]


class VoidTraceError(Exception):
    """The facts contradict one another."""


def demand(condition: bool, otherwise: str) -> None:
    """Void the trace unless a condition holds.

    Raises:
        VoidTraceError: says ``otherwise``.
    """
    if not condition:
        raise VoidTraceError(otherwise)


def listed(runs: Iterable[ev.Run]) -> tuple[Page, ...]:
    """Return the pages of runs, in order."""
    return tuple((run.source, page) for run in runs for page in range(run.start, run.end))


def spread(runs: Iterable[ev.Run]) -> frozenset[Page]:
    """Return the pages of runs as a set."""
    return frozenset(listed(runs))


def terms(asked: ev.ClaimRequested) -> str:
    """Return a request's terms, so that an answer is to these terms and no others."""
    lasts = "until released" if asked.ttl_s is None else f"for {asked.ttl_s} s"
    admits = ", write no-admit" if asked.write_no_admit else ""
    return (
        f"revision {asked.revision}: {asked.kind}, priority {asked.priority}, {asked.required} "
        f"pages of {asked.source}[{asked.start}:{asked.end}] for {asked.session}, {lasts}{admits}"
    )


class Phase(StrEnum):
    """The state of a claim, by the facts so far."""

    ACCEPTED = "accepted"
    FOUND = "found"
    MATERIALIZED = "materialized"
    DEMOTED = "demoted"
    FAILED = "materialization_failed"
    EVICTED = "evicted"
    EXPIRED = "expired"
    RELEASED = "released"
    HARMED = "harmed"

    @property
    def lives(self) -> bool:
        return self in (Phase.ACCEPTED, Phase.FOUND, Phase.MATERIALIZED, Phase.DEMOTED)


@dataclass(slots=True)
class ClaimTrace:
    """A claim's terms and its pages."""

    key: Key
    revision: int
    kind: str
    priority: int
    source: str
    start: int
    end: int
    """Tokens of its span, half open."""
    required: int
    deadline_ms: int | None
    phase: Phase = Phase.ACCEPTED
    found: frozenset[Page] = frozenset()
    held: frozenset[Page] = frozenset()
    floor: int = 0
    """Number of pages below which it fails."""
    locked: bool = False
    decided: bool = False
    """True if its priority has saved a page."""

    @classmethod
    def of(cls, asked: ev.ClaimRequested, deadline_ms: int | None) -> ClaimTrace:
        """Return the record of a claim as it was requested."""
        return cls(
            key=(asked.tenant, asked.claim),
            revision=asked.revision,
            kind=asked.kind,
            priority=asked.priority,
            source=asked.source,
            start=asked.start,
            end=asked.end,
            required=asked.required,
            deadline_ms=deadline_ms,
        )

    def pages(self, page_size: int) -> tuple[int, int]:
        """Return the start and end of the span's pages on their source's path."""
        return self.start // page_size, -(-self.end // page_size)


@dataclass(slots=True)
class RequestTrace:
    """A request that has arrived and not ended."""

    arrived: ev.Arrived
    since: int = 0
    """Number of pages that had ever become resident when it arrived."""
    matched: tuple[Page, ...] = ()
    evicted: set[str] = field(default_factory=set)
    """Sources of pages evicted for it. Its matched pages have to be pinned before that."""
    taken: int | None = None
    """Number of pages that it took and has not given back; None until it runs."""
    kept: int = 0
    """Number of the taken pages that became resident."""
    given_back: int = 0
    """Number of the taken pages that it no longer has."""


class Trace:
    """Pool, claims and requests."""

    def __init__(self) -> None:
        self.usable = -1
        self.page_size = 1
        self.strict = False
        self.tree = False
        self.free = 0
        self.now_ms = 0
        self.ticks = 0
        self.uses = 0
        self.resident: dict[Page, int] = {}
        """Last use of each page."""
        self.born: dict[Page, int] = {}
        """Number of pages that had ever become resident when this one did, by page."""
        self.births = 0
        self.paths: dict[str, tuple[Page, ...]] = {}
        """Names of a source's pages, in order."""
        self.claims: dict[Key, ClaimTrace] = {}
        self.requests: dict[str, RequestTrace] = {}
        self.asked: ev.ClaimRequested | None = None
        self.starting: str | None = None
        self.next_of: Key | None = None
        """The claim whose pages must be locked or ranked next."""
        self.owed: set[Key] = set()
        """Claims that must let go of their pages next."""

    def check_turn(self, event: ev.AnyEvent) -> None:
        """Demand that what has begun continues before anything else happens."""
        demand((self.usable < 0) is isinstance(event, ev.Opened), "the pool opens first, and once")
        key = (event.tenant, event.claim) if isinstance(event, ev.ClaimEvent) else None
        if self.asked is not None:
            demand(isinstance(event, ev.ClaimRefused | ev.Entered), "a claim waits for its answer")
        elif self.next_of is not None:
            demand(key == self.next_of, "a claim's pages were neither locked nor ranked")
            demand(isinstance(event, ev.Locked | ev.Ranked), "its pages wait to be held")
        elif self.owed:
            demand(key in self.owed, "a claim that is over still holds pages")
            demand(isinstance(event, ev.Unlocked | ev.Unranked), "its pages wait to be let go")
        elif self.starting is not None and not self.tree:
            name = getattr(event, "request", None)
            demand(name == self.starting, "a request was left between arrival and start")
        elif not isinstance(event, ev.Expired):
            demand(not any(map(self.overdue, self.claims.values())), "a claim outlived its time")

    def open(self, event: ev.Opened) -> None:
        """Begin with an empty pool."""
        self.usable = self.free = event.usable
        self.page_size, self.strict, self.now_ms = event.page_size, event.strict, event.now_ms
        self.tree = event.tree

    def tick(self, event: ev.Ticked) -> None:
        """Advance the clock."""
        demand(event.order == self.ticks + 1, "a message of the clock is missing")
        demand(event.now_ms >= self.now_ms, "the clock went back")
        self.ticks, self.now_ms = event.order, event.now_ms

    def overdue(self, claim: ClaimTrace) -> bool:
        """Return True if a live claim's deadline has come."""
        due = claim.deadline_ms
        return claim.phase.lives and due is not None and due <= self.now_ms

    def name(self, key: Key) -> str:
        """Return a claim's name in findings."""
        return "/".join(key)

    def claim(self, event: ev.ClaimEvent) -> ClaimTrace:
        """Return the claim that an event is about."""
        found = self.claims.get((event.tenant, event.claim))
        if found is None:
            raise VoidTraceError("a claim that nobody entered")
        return found

    def request(self, event: ev.AnyEvent) -> RequestTrace:
        """Return the request that an event is about."""
        found = self.requests.get(getattr(event, "request", ""))
        if found is None:
            raise VoidTraceError("a request that didn't arrive")
        starts = isinstance(event, ev.RequestRefused | ev.Matched | ev.Evicted | ev.Allocated)
        if not self.tree:
            demand(starts is (self.starting is not None), "not at the request's start")
        return found

    def span(self, claim: ClaimTrace) -> tuple[Page, ...]:
        """Return the pages of a claim's predicate, as far as its source has them."""
        first, last = claim.pages(self.page_size)
        return self.paths.get(claim.source, ())[first:last]

    def support(self, claim: ClaimTrace) -> tuple[Page, ...]:
        """Return the pages that stay for the sake of the claim's: in a tree, all before them."""
        first, _ = claim.pages(self.page_size)
        return self.paths.get(claim.source, ())[:first] if self.tree else ()

    def account(self, change: int, free: int) -> None:
        """Count free pages after a change of the pool, and compare with the event's number."""
        self.free += change
        demand(self.free == free, f"{free} pages are said to be free, {self.free} are")
        demand(0 <= free <= self.usable - len(self.resident), "more pages than the pool has")

    def touch(self, pages: Set[Page]) -> None:
        """Make these pages the most recently used."""
        self.uses += 1
        self.resident.update(dict.fromkeys(pages, self.uses))

    def bear(self, pages: Set[Page]) -> None:
        """Make pages resident."""
        self.births += 1
        self.born.update(dict.fromkeys(pages, self.births))
        self.touch(pages)

    def take_out(self, pages: Set[Page], free: int) -> dict[Page, int]:
        """Move resident pages back to the pool, and return their last uses."""
        demand(bool(pages), "no pages went")
        demand(pages <= self.resident.keys(), "pages went that weren't resident")
        demand(not pages & self.in_use(), "pages went that a request uses")
        used = {page: self.resident.pop(page) for page in pages}
        demand(
            not self.tree or not any(map(self.has_hole, self.paths.values())), "a hole in a path"
        )
        self.account(len(pages), free)
        return used

    def has_hole(self, path: tuple[Page, ...]) -> bool:
        """Return True if a path has a resident page after one that is gone."""
        stay = [page in self.resident for page in path]
        return stay != sorted(stay, reverse=True)

    def in_use(self) -> frozenset[Page]:
        """Return the resident pages that requests match."""
        return frozenset(page for request in self.requests.values() for page in request.matched)

    def locked(self) -> frozenset[Page]:
        """Return the pages that claims lock."""
        return frozenset().union(*(c.held for c in self.claims.values() if c.locked))

    def ranks(self) -> dict[Page, int]:
        """Return the highest priority of each page that a claim ranks."""
        found: dict[Page, int] = {}
        for claim in self.claims.values():
            if not claim.locked:
                for page in claim.held:
                    found[page] = max(found.get(page, 0), claim.priority)
        return found

    def hit(self, pages: Set[Page], phase: Phase) -> list[tuple[Key, int]]:
        """Take pages from the claims that hold them.

        Returns:
            Claims whose predicate fails for it, now in ``phase``, and the number of pages each
            lost.
        """
        failed = []
        for key, claim in self.claims.items():
            gone = len(claim.held & pages)
            if not gone:
                continue
            claim.held -= pages
            if len(claim.held) < claim.floor:
                claim.phase = phase
                self.owe(claim)
                failed.append((key, gone))
        return failed

    def owe(self, claim: ClaimTrace) -> None:
        """Expect an ended claim to let go of its pages, if it has any."""
        if claim.held:
            self.owed.add(claim.key)

    def balance(self) -> Balance:
        """Return the state of all claims, requests and pages."""
        unfinished = [self.name(key) for key in (*self.owed, *filter(None, [self.next_of]))]
        if self.asked is not None:
            unfinished.append(self.name((self.asked.tenant, self.asked.claim)))
        if self.starting is not None:
            unfinished.append(self.starting)
        resident: dict[str, int] = {}
        for source, _ in self.resident:
            resident[source] = resident.get(source, 0) + 1
        return Balance(
            free=self.free,
            resident=dict(sorted(resident.items())),
            locked=len(self.locked()),
            claims={self.name(key): claim.phase.value for key, claim in self.claims.items()},
            running=tuple(self.requests),
            unfinished=tuple(sorted(unfinished)),
            now_ms=self.now_ms,
            ticks=self.ticks,
        )
