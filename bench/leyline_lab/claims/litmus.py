"""The litmus suite: named situations, each with the outcomes that a conforming engine shows.

A case drives an engine and sees only what a client or scheduler sees. Its outcomes are read from
the engine's events by the reader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from leyline_engine.claims.answers import UnknownClaimError
from leyline_engine.claims.book import ClaimBook
from leyline_engine.claims.events import AnyEvent, Run
from leyline_engine.claims.limits import ClaimRefusedError, Limits
from leyline_engine.contract import Claim, ClaimKind, ClaimRefusal, ClaimStatus, Predicate

from .micro import MicroRuntime, Request
from .mutants import mutants
from .reader import read
from .verdict import Outcome, TraceFinding, TraceVerdict

PAGE = 16
"""Tokens per page of the allocator."""
LIMITS = Limits(share=1.0, engine_share=1.0)
"""Limits of the cases, which test the pool and not a tenant's share."""


def unit_of(page: int) -> int:
    """Return the tokens of a case's page on an engine with pages of ``page`` tokens.

    An engine's own reserve is a page of its own, and less than one of these.
    """
    return max(PAGE, 2 * page)


class Runtime(Protocol):
    """An engine as the cases drive it: one request at a time.

    Places and sizes are in pages of :attr:`unit` tokens, which are whole pages of the engine.
    """

    @property
    def unit(self) -> int:
        """Tokens of a case's page."""

    @property
    def book(self) -> ClaimBook:
        """Its book of claims."""

    def serve(self, request: Request) -> ClaimRefusal | None:
        """Run a request to its end, or return why it can't run before a claim ends."""

    def claim(self, claim: Claim) -> None:
        """Take a claim.

        Raises:
            ClaimRefusedError: names the limit or field.
        """

    def release(self, tenant: str, claim: str) -> None:
        """End a claim.

        Raises:
            UnknownClaimError: not one of this tenant's.
        """

    def demote(self, tenant: str, claim: str) -> None:
        """Give up a claim's locks."""

    def tick(self, order: int, now_ms: int) -> None:
        """Take the clock's next message."""

    def lose(self, run: Run, cause: str) -> None:
        """Drop resident pages, whoever locked them; in a tree also those after them."""

    def edit(self, name: str, old: str, new: str, start: int, end: int) -> None:
        """Run a turn ``new`` to its end: ``old`` without pages ``[start, end)``, and one more.

        Both are of tenant ``a``; the KV that is left is spliced.

        Raises:
            NotImplementedError: this engine doesn't splice.
        """


OpenRuntime = Callable[[int, Callable[[AnyEvent], None]], Runtime]
"""Opens a runtime, given the pages of the pool and the sink of its events."""


def open_micro(usable: int, sink: Callable[[AnyEvent], None]) -> Runtime:
    """Open a MicroRuntime for the cases."""
    return MicroRuntime(usable, page_size=PAGE, limits=LIMITS, sink=sink)


class LitmusStage:
    """One engine, and short names for what a case does to it."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.told: list[str] = []
        """Answers that callers got, for cases that test them."""

    def serve(
        self, name: str, source: str, pages: int, *, tenant: str = "a", admit: bool = True
    ) -> ClaimRefusal | None:
        """Serve a request that comes to ``pages``, one of output and one of reserve among them.

        If it runs, it leaves all but the reserve in the cache.
        """
        unit, session = self.runtime.unit, session_of(tenant)
        prompt = (pages - 2) * unit
        return self.runtime.serve(Request(name, tenant, session, source, prompt, unit, not admit))

    def keep(self, source: str, pages: int, *, tenant: str = "a") -> None:
        """Serve a request that leaves that many pages in the cache."""
        self.serve(f"{PREPARATION}{source}", source, pages + 1, tenant=tenant)

    def claim(self, source: str, pages: int, start: int = 0, **terms: Any) -> None:
        """Claim pages of a source, hard unless ``terms`` say otherwise.

        Args:
            start: the first page; ``pages`` is where the claim ends.
        """
        tenant = terms.get("tenant", "a")
        given = {"id": "c", "tenant": "a", "session": session_of(tenant), "kind": ClaimKind.HARD}
        unit = self.runtime.unit
        span = Predicate(source, start * unit, pages * unit)
        self.runtime.claim(Claim(predicate=span, **(given | terms)))

    def refused(self, source: str, pages: int, **terms: Any) -> None:
        """Make a claim that must be refused, and note what the refusal named."""
        try:
            self.claim(source, pages, **terms)
        except ClaimRefusedError as refusal:
            self.told.append(refusal.field)

    def unknown(self, tenant: str, claim: str) -> None:
        """Release a claim that isn't this tenant's, and note the answer."""
        try:
            self.runtime.release(tenant, claim)
        except UnknownClaimError as error:
            self.told.append(str(error))


def session_of(tenant: str) -> str:
    """Return the one session of a tenant."""
    return f"{tenant}-session"


@dataclass(frozen=True, slots=True)
class Case:
    """A situation and its expected outcomes."""

    name: str
    usable: int
    play: Callable[[LitmusStage], None]
    outcomes: tuple[tuple[Outcome, str], ...]
    """(outcome, subject) in order, without preparations and what is implied."""
    told: tuple[str, ...] = ()


PREPARATION = "fill-"
"""Prefix of the names of requests that only leave something in the cache."""

IMPLIED = frozenset({Outcome.ADMISSION, Outcome.ACCEPTANCE, Outcome.FURTHER_EVICTION})
"""Outcomes that another implies: an end, or an earlier eviction. They aren't compared."""


FOLLOWING = frozenset(
    {Outcome.MOVE, Outcome.SHRINK, Outcome.HARM, Outcome.HARD_CLAIM, Outcome.SOFT_CLAIM}
)
"""Outcomes of claims that follow a turn's tokens when it ends. An engine may move them before it
takes the turn's pages back, or after; they are compared as if it were after."""


class CaseResult(msgspec.Struct, frozen=True, kw_only=True):
    """The behaviour of an engine in one case."""

    name: str
    passed: bool
    expected: tuple[tuple[str, str], ...]
    verdict: TraceVerdict
    told: tuple[str, ...]
    states_agree: bool
    """True if the engine's book and the reader agree on each claim's state."""
    mutants: int
    missed: tuple[str, ...]
    """Mutants that read like the original trace."""
    events: tuple[Any, ...]


def run_case(case: Case, open_runtime: OpenRuntime) -> CaseResult:
    """Play a case on a fresh engine and read its events."""
    events: list[AnyEvent] = []
    stage = LitmusStage(open_runtime(case.usable, events.append))
    case.play(stage)
    verdict = read(events)
    seen = _compared(verdict)
    agree = verdict.balance is not None and all(
        _status(stage.runtime.book, name).state == phase
        for name, phase in verdict.balance.claims.items()
    )
    tried = [(mutant.name, read(mutant.events)) for mutant in mutants(events)]
    missed = tuple(name for name, other in tried if other == verdict)
    told = tuple(stage.told)
    return CaseResult(
        name=case.name,
        passed=(seen, told) == (case.outcomes, case.told) and agree and not missed,
        expected=tuple((outcome.value, subject) for outcome, subject in case.outcomes),
        verdict=verdict,
        told=told,
        states_agree=agree,
        mutants=len(tried),
        missed=missed,
        events=tuple(msgspec.to_builtins(event) for event in events),
    )


def _compared(verdict: TraceVerdict) -> tuple[tuple[Outcome, str], ...]:
    """Return the outcomes that a case names, in order."""
    order: list[TraceFinding] = []
    for found in verdict.findings:
        at = len(order)
        while found.outcome is Outcome.SERVICE and at and order[at - 1].outcome in FOLLOWING:
            at -= 1
        order.insert(at, found)
    return tuple(
        (found.outcome, found.subject)
        for found in order
        if found.outcome not in IMPLIED and not found.subject.startswith(PREPARATION)
    )


def run_suite(cases: Iterable[Case], open_runtime: OpenRuntime) -> tuple[CaseResult, ...]:
    """Run all cases, each on its own engine."""
    return tuple(run_case(case, open_runtime) for case in cases)


def _status(book: ClaimBook, name: str) -> ClaimStatus:
    tenant, _, claim = name.partition("/")
    return book.status(tenant, claim)
