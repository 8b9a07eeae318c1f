"""The litmus suite: named situations, each with the outcomes that a conforming engine shows.

A case drives an engine and sees only what a client or scheduler sees. Its outcomes are read from
the engine's events by the reader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from leyline_engine.contract import Claim, ClaimKind, ClaimRefusal, ClaimStatus, Predicate

from .answers import UnknownClaimError
from .book import ClaimBook
from .events import AnyEvent, Run
from .limits import ClaimRefusedError, Limits
from .micro import MicroRuntime, Request
from .mutants import mutants
from .reader import read
from .verdict import Outcome, Verdict

PAGE = 16
LIMITS = Limits(share=1.0, engine_share=1.0)
"""What the cases are about is the pool, not what a tenant may have of it."""


class Runtime(Protocol):
    """An engine as the cases drive it: one request at a time. Places and sizes are in pages."""

    @property
    def book(self) -> ClaimBook:
        """Its claims."""

    def serve(self, request: Request) -> ClaimRefusal | None:
        """Run a request to its end; or say why it can't run before a claim goes."""

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
        """The clock's next message."""

    def lose(self, run: Run, cause: str) -> None:
        """Resident pages are gone, whoever locked them; in a tree also those behind them."""

    def edit(self, name: str, old: str, new: str, start: int, end: int) -> None:
        """Run a turn ``new`` to its end: what ``old`` has, without its pages ``[start, end)``, and
        a page more. Both are of tenant ``a``; what is left is spliced.

        Raises:
            NotImplementedError: this engine doesn't splice.
        """


OpenRuntime = Callable[[int, Callable[[AnyEvent], None]], Runtime]
"""Pages of the pool, and where its events go."""


def open_micro(usable: int, sink: Callable[[AnyEvent], None]) -> Runtime:
    """A MicroRuntime for the cases."""
    return MicroRuntime(usable, page_size=PAGE, limits=LIMITS, sink=sink)


class Stage:
    """One engine and short words for what a case does to it."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.told: list[str] = []
        """What callers were answered, where the case is about that."""

    def serve(
        self, name: str, source: str, pages: int, *, tenant: str = "a", admit: bool = True
    ) -> ClaimRefusal | None:
        """A request that comes to ``pages``, one of output and one of reserve among them.

        Where it runs, it leaves all but the reserve behind.
        """
        return self.runtime.serve(_request(name, source, pages, tenant=tenant, admit=admit))

    def keep(self, source: str, pages: int, *, tenant: str = "a") -> None:
        """A request leaves so many pages behind."""
        self.serve(f"{PREPARATION}{source}", source, pages + 1, tenant=tenant)

    def claim(self, source: str, pages: int, start: int = 0, **terms: Any) -> None:
        """Claim pages of a source, hard unless ``terms`` say otherwise.

        Args:
            start: the first page; ``pages`` is where the claim ends.
        """
        tenant = terms.get("tenant", "a")
        given = {"id": "c", "tenant": "a", "session": session_of(tenant), "kind": ClaimKind.HARD}
        span = Predicate(source, start * PAGE, pages * PAGE)
        self.runtime.claim(Claim(predicate=span, **(given | terms)))

    def refused(self, source: str, pages: int, **terms: Any) -> None:
        """The same where it must be refused; what was named is told."""
        try:
            self.claim(source, pages, **terms)
        except ClaimRefusedError as refusal:
            self.told.append(refusal.field)

    def unknown(self, tenant: str, claim: str) -> None:
        """Release a claim that isn't this tenant's; the answer is told."""
        try:
            self.runtime.release(tenant, claim)
        except UnknownClaimError as error:
            self.told.append(str(error))


def session_of(tenant: str) -> str:
    """The one session of a tenant."""
    return f"{tenant}-session"


def _request(
    name: str, source: str, pages: int, *, tenant: str = "a", admit: bool = True
) -> Request:
    return Request(name, tenant, session_of(tenant), source, (pages - 2) * PAGE, PAGE, not admit)


@dataclass(frozen=True, slots=True)
class Case:
    """A situation and its outcomes."""

    name: str
    usable: int
    play: Callable[[Stage], None]
    outcomes: tuple[tuple[Outcome, str], ...]
    """(outcome, subject) in order, without preparations and what is implied."""
    told: tuple[str, ...] = ()


PREPARATION = "fill-"
"""How requests are called that only leave something behind."""

IMPLIED = frozenset({Outcome.ADMISSION, Outcome.ACCEPTANCE})
"""Said by what a request or claim came to; not compared."""


class CaseResult(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine showed."""

    name: str
    passed: bool
    expected: tuple[tuple[str, str], ...]
    verdict: Verdict
    told: tuple[str, ...]
    states_agree: bool
    """Whether the engine's book says of each claim what the reader says."""
    mutants: int
    missed: tuple[str, ...]
    """Mutants that read like the original."""
    events: tuple[Any, ...]


def run_case(case: Case, open_runtime: OpenRuntime) -> CaseResult:
    """Play a case on a fresh engine and read its events."""
    events: list[AnyEvent] = []
    stage = Stage(open_runtime(case.usable, events.append))
    case.play(stage)
    verdict = read(events)
    seen = tuple(
        (found.outcome, found.subject)
        for found in verdict.findings
        if found.outcome not in IMPLIED and not found.subject.startswith(PREPARATION)
    )
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


def run_suite(cases: Iterable[Case], open_runtime: OpenRuntime) -> tuple[CaseResult, ...]:
    """All cases, each on an engine of its own."""
    return tuple(run_case(case, open_runtime) for case in cases)


def _status(book: ClaimBook, name: str) -> ClaimStatus:
    tenant, _, claim = name.partition("/")
    return book.status(tenant, claim)
