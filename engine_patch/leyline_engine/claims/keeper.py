"""Claims in both engines: commands in, locks and ranks out, and a check at admission.

The keeper has the book, the names of claimed slots and the pages of each claim; the engine's cache
(:class:`Shelf`) carries out its effects. There is one per engine process, driven by that process's
thread; it has no clock. The cache's side speaks of slots and keys, the book of pages.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from leyline_engine.contract import (
    Claim,
    ClaimCommand,
    ClaimProblem,
    ClaimRefusal,
    ClaimReply,
    CopySegment,
    DemoteClaim,
    GetClaim,
    GetClaimEvents,
    ListClaims,
    ProblemCode,
    ReleaseClaim,
    SubmitClaim,
    common_prefix,
)
from leyline_engine.records.sources import SessionKey, SourceRegistry, SourceTurn

from .answers import Change, Effect, UnknownClaimError
from .book import ClaimBook
from .events import Arrived, EventLedger, Evicted, Lost, RequestRefused, Run
from .feasibility import Admission, Arithmetic, Demand, Feasibility
from .limits import ClaimRefusedError, Limits
from .place import ClaimPlace, length_with_kv
from .protection import ClaimKey
from .runs import count, first_pages, last_pages, without
from .states import State, TransitionError


def followed(
    place: ClaimPlace,
    turn: SourceTurn,
    sources: Sequence[SourceTurn],
    copies: Sequence[CopySegment],
) -> tuple[int, int] | None:
    """Return the span of ``turn`` that holds the rest of a claim.

    Args:
        place: the claim's tokens as they are held.
        turn: the edited turn.
        sources: turns that it took tokens from.
        copies: the spans that it took, by index of ``sources``, whether copied or computed again.

    Returns:
        A half-open span, empty if nothing is left; None if the edit doesn't concern the claim: the
        turn has its pages where they were, or took tokens from nothing that holds them.
    """
    now = turn.keys()
    if place.covered_by(now, len(now)):
        return None
    for index, source in enumerate(sources):
        theirs = source.keys()
        if common_prefix(place.keys, theirs) >= place.end:
            kept = common_prefix(theirs, now)
            mine = [copy for copy in copies if copy.source == index]
            pieces = _pieces(place.start, place.end, kept, mine)
            return max(_joined(sorted(pieces)), key=lambda piece: piece[1] - piece[0])
    return None


def _pieces(
    start: int, end: int, kept: int, copies: Sequence[CopySegment]
) -> Iterator[tuple[int, int]]:
    """Yield the parts of ``[start, end)`` at their new places; an empty one first."""
    yield 0, 0
    if start < kept:
        yield start, min(end, kept)
    for copy in copies:
        first, last = max(start, copy.start), min(end, copy.end)
        if first < last:
            yield copy.dest + first - copy.start, copy.dest + last - copy.start


def _joined(pieces: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the sorted pieces, with those that touch or overlap joined."""
    found: list[tuple[int, int]] = []
    for first, last in pieces:
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return found


Page = tuple[str, int]


class PageNames:
    """Names of pages, kept as long as somebody needs them.

    Args:
        page: tokens per page.
    """

    def __init__(self, page: int = 1) -> None:
        self._page = page
        self._names: dict[int, Page] = {}
        self._slots: dict[Page, int] = {}

    def __len__(self) -> int:
        return len(self._names)

    def name(self, source: str, slots: Sequence[int]) -> tuple[Run, ...]:
        """Return the runs of a whole path; pages without a name get one.

        Args:
            slots: of whole pages, from the root on, in key order.
        """
        firsts = slots[:: self._page]
        title = self._title(source, firsts)
        return tuple(_runs(self._named(title, place, slot) for place, slot in enumerate(firsts)))

    def _title(self, source: str, slots: Sequence[int]) -> str:
        """Return the source's name, altered if another session's or tenant's source has it here.

        No source's own name has a space in it.
        """
        places = [place for place, slot in enumerate(slots) if slot not in self._names]
        title, number = source, 1
        while any((title, place) in self._slots for place in places):
            number += 1
            title = f"{source} #{number}"
        return title

    def _named(self, source: str, place: int, slot: int) -> Page:
        known = self._names.get(slot)
        if known is None:
            known = (source, place)
            self._names[slot], self._slots[known] = known, slot
        return known

    def known(self, slots: Sequence[int]) -> tuple[Run, ...]:
        """Return the runs of those pages that have names.

        Args:
            slots: of whole pages.
        """
        pages = map(self._names.get, slots[:: self._page])
        return tuple(_runs(page for page in pages if page is not None))

    def forget(self, runs: Iterable[Run]) -> None:
        """Drop the names of pages that are gone or have no holder."""
        for run in runs:
            for place in range(run.start, run.end):
                slot = self._slots.pop((run.source, place), None)
                if slot is not None:
                    del self._names[slot]

    def clear(self) -> None:
        """Drop all names: nothing is cached any more."""
        self._names.clear()
        self._slots.clear()


def _runs(pages: Iterable[Page]) -> Iterator[Run]:
    current: Run | None = None
    for source, place in pages:
        if current is not None and (current.source, current.end) == (source, place):
            current = Run(source, current.start, place + 1)
            continue
        if current is not None:
            yield current
        current = Run(source, place, place + 1)
    if current is not None:
        yield current


class Shelf(Protocol):
    """A cache of whole prefixes, as claims see it. Lengths are whole pages of a place's keys."""

    def slots(self, place: ClaimPlace) -> Sequence[int]:
        """Return the slots of the cached part of a claim's path, whole pages, in order; recency
        doesn't change."""

    def lock(self, claim: ClaimKey, place: ClaimPlace, length: int) -> None:
        """Lock a path's cached beginning against eviction, and no neighbour of it."""

    def unlock(self, claim: ClaimKey) -> None:
        """Undo a :meth:`lock`."""

    def rank(self, claim: ClaimKey, place: ClaimPlace, length: int, priority: int) -> None:
        """Evict a path's cached beginning after slots of lower priority."""

    def unrank(self, claim: ClaimKey) -> None:
        """Undo a :meth:`rank`."""

    def free(self) -> int:
        """Return the number of free slots."""


@dataclass(frozen=True, slots=True)
class ArrivingRequest:
    """A request before it is queued."""

    name: str
    tenant: str
    session: str
    source: str
    """Source under which its turn will be retained."""
    prompt_tokens: int
    max_new_tokens: int


class ClaimKeeper:
    """Claims of one engine.

    Args:
        registry: the engine's retained turns, which claims name.
        usable: slots of the pool; those that don't fill a page can't be claimed.
        arithmetic: the engine's calculation of a request's needs.
        ledger: ledger of events.
        watched: True if somebody else records evictions and names all slots, as the litmus suite
            does; otherwise only claimed slots have names, and only their evictions are recorded.
    """

    def __init__(
        self,
        registry: SourceRegistry,
        shelf: Shelf,
        usable: int,
        arithmetic: Arithmetic,
        *,
        limits: Limits | None = None,
        ledger: EventLedger | None = None,
        watched: bool = False,
    ) -> None:
        self.ledger = EventLedger() if ledger is None else ledger
        self._page = arithmetic.page_size
        self.book = ClaimBook(
            usable // self._page,
            arithmetic,
            self.ledger,
            limits=limits,
            tree=True,
            usable_tokens=usable,
        )
        self.names = PageNames(self._page)
        self.watched = watched
        self._registry = registry
        self._shelf = shelf
        self.places: dict[ClaimKey, ClaimPlace] = {}
        """The places of live claims."""

    def __bool__(self) -> bool:
        """Return True if any claim is live; without one, nothing here costs a request anything."""
        return bool(self.places)

    # ── commands ──────────────────────────────────────────────────────────────────────────────

    def carry_out(self, command: ClaimCommand) -> ClaimReply:
        """Carry out a proxy's command; an error goes into the reply."""
        try:
            return self._carry_out(command)
        except UnknownClaimError as error:
            return self._refused(ProblemCode.UNKNOWN_CLAIM, str(error))
        except ClaimRefusedError as error:
            return self._refused(_code_of(error.field), str(error), error.field)
        except TransitionError:
            message = "only a hard claim whose tokens are locked can be demoted"
            return self._refused(ProblemCode.NOT_LOCKED, message)

    def _carry_out(self, command: ClaimCommand) -> ClaimReply:
        match command:
            case SubmitClaim(claim):
                self.submit(claim)
                return self._status(claim.tenant, claim.id)
            case ReleaseClaim(tenant, claim_id):
                self.release(tenant, claim_id)
                return self._status(tenant, claim_id)
            case DemoteClaim(tenant, claim_id):
                self.demote(tenant, claim_id)
                return self._status(tenant, claim_id)
            case GetClaim(tenant, claim_id):
                return self._status(tenant, claim_id)
            case ListClaims(tenant, limit):
                live = self.book.live(tenant)[:limit]
                return ClaimReply(claims=live, seq=self.ledger.last)
            case GetClaimEvents():
                return self._events(command)

    def _status(self, tenant: str, claim: str) -> ClaimReply:
        return ClaimReply(claims=(self.book.status(tenant, claim),), seq=self.ledger.last)

    def _refused(self, code: ProblemCode, message: str, field: str = "") -> ClaimReply:
        return ClaimReply(problem=ClaimProblem(code, message, field), seq=self.ledger.last)

    def _events(self, command: GetClaimEvents) -> ClaimReply:
        if command.claim:
            self.book.status(command.tenant, command.claim)
        chosen = self.ledger.behind(
            command.after, command.limit, tenant=command.tenant, claim=command.claim
        )
        events = tuple(msgspec.to_builtins(event) for event in chosen)
        return ClaimReply(events=events, seq=self.ledger.last)

    def tick(self, order: int, now_ms: int) -> None:
        """Take the clock's next message; see :meth:`.book.ClaimBook.tick`."""
        self._apply(self.book.tick(order, now_ms))

    def release(self, tenant: str, claim: str) -> None:
        """Release a claim; see :meth:`.book.ClaimBook.release`."""
        self._apply(self.book.release(tenant, claim))

    def demote(self, tenant: str, claim: str) -> None:
        """Demote a claim; see :meth:`.book.ClaimBook.demote`."""
        self._apply(self.book.demote(tenant, claim))

    def submit(self, claim: Claim) -> None:
        """Take a claim, or a later revision of one, and hold those of its tokens that are cached.

        Raises:
            ClaimRefusedError: names the limit or field; an earlier revision stays as it is.
        """
        session = (claim.tenant, claim.session)
        turn = self._registry.get_plain(session, claim.predicate.source)
        length = None if turn is None else length_with_kv(turn)
        self._apply(self.book.submit(claim, length, whole_pages=True))
        if turn is not None:
            key = (claim.tenant, claim.id)
            self._seek(key, turn, claim.predicate.start, claim.predicate.end)

    def _seek(self, key: ClaimKey, turn: SourceTurn, start: int, end: int) -> None:
        """Look for a claim's tokens, and hold those that are cached."""
        place = ClaimPlace.of(turn, start, end, self._page)
        path = self.names.name(turn.turn, self._shelf.slots(place))
        support = first_pages(path, place.before)
        self.places[key] = place
        self._apply(self.book.seek(key, last_pages(path, count(path) - place.before), support))
        self._drop_names(path)

    def _apply(self, effects: Iterable[Effect]) -> None:
        """Have the cache carry out the book's effects."""
        for effect in effects:
            place = self.places.get(effect.claim)
            match effect.change:
                case Change.LOCK if place is not None:
                    self._shelf.lock(effect.claim, place, count(effect.runs) * self._page)
                case Change.RANK if place is not None:
                    reach = self._reach(effect.claim, place) * self._page
                    self._shelf.rank(effect.claim, place, reach, effect.priority)
                case Change.UNLOCK:
                    self._shelf.unlock(effect.claim)
                    self._drop_names(effect.runs)
                case Change.UNRANK:
                    self._shelf.unrank(effect.claim)
                    self._drop_names(effect.runs)
        for key in [key for key in self.places if not self.book.lives(key)]:
            # For a claim that has lost all it held, the book has no effects.
            self._shelf.unlock(key)
            self._shelf.unrank(key)
            del self.places[key]

    def _reach(self, key: ClaimKey, place: ClaimPlace) -> int:
        """Return the number of pages up to the end of what a claim holds."""
        held = count(self.book.held(key))
        return held if self.book.support(key) else place.before + held

    def _drop_names(self, runs: Iterable[Run]) -> None:
        if not self.watched:
            self.names.forget(self.book.unheld(runs))

    # ── requests ──────────────────────────────────────────────────────────────────────────────

    def refuse(
        self, request: ArrivingRequest, matched: Callable[[], Sequence[int]]
    ) -> ClaimRefusal | None:
        """Return why a request can't run before a claim ends; None if no claim is in its way.

        Args:
            matched: returns the slots of its cached prefix; called only near the limit.
        """
        found = self._blocked(request, matched)
        if found is None:
            return None
        runs, admission = found
        self._record_refusal(request, runs, admission)
        self.book.tell_pressure(admission.blocking)
        return admission.refusal

    def crowded(self, request: ArrivingRequest) -> ClaimRefusal:
        """Return the refusal of a request that fits beside the claims, but not beside what runs."""
        demand = Demand(request.tenant, request.prompt_tokens, request.max_new_tokens)
        admission = self.book.crowded(demand)
        self.book.tell_pressure(admission.blocking)
        return admission.refusal

    def blocks(self, request: ArrivingRequest, matched: Callable[[], Sequence[int]]) -> bool:
        """Return True if :meth:`refuse` would refuse; nothing is recorded."""
        return self._blocked(request, matched) is not None

    def _blocked(
        self, request: ArrivingRequest, matched: Callable[[], Sequence[int]]
    ) -> tuple[tuple[Run, ...], Admission] | None:
        if not self.book.protected_pages:
            return None
        demand = Demand(request.tenant, request.prompt_tokens, request.max_new_tokens)
        if self.book.check(demand).feasibility is Feasibility.FITS:
            return None
        runs = self.names.known(matched())
        demand = Demand(request.tenant, request.prompt_tokens, request.max_new_tokens, runs)
        admission = self.book.check(demand)
        blocked = admission.feasibility is Feasibility.BLOCKED
        return (runs, admission) if blocked else None

    def _record_refusal(
        self, request: ArrivingRequest, runs: tuple[Run, ...], admission: Admission
    ) -> None:
        held = admission.held // self._page
        self.ledger.append(
            Arrived(
                request=request.name,
                tenant=request.tenant,
                session=request.session,
                source=request.source,
                prompt=-(-request.prompt_tokens // self._page),
                pages=held + self.book.arithmetic.pages(admission.needed),
                write_no_admit=not self.admits(request.tenant, request.session),
            )
        )
        self.ledger.append(
            RequestRefused(
                request=request.name,
                matched=runs,
                held=held,
                protected=admission.protected // self._page,
                blocking=admission.blocking,
            )
        )

    def admits(self, tenant: str, session: str) -> bool:
        """Return True if KV that a session's next request computes may be kept for reuse."""
        return self.book.admits(tenant, session)

    def matched(self, session: SessionKey, keys: array[int], length: int) -> None:
        """Record hits of the claims that a session's request covers with ``length`` cached keys."""
        for key, place in self.places.items():
            if place.session == session and place.covered_by(keys, length):
                self.book.tell_hit(key)

    def follow(
        self, turn: SourceTurn, sources: Sequence[SourceTurn], copies: Sequence[CopySegment]
    ) -> None:
        """Move a session's claims with their tokens, once a turn of spliced KV is retained.

        Args:
            turn, sources, copies: see :func:`.following.followed`.
        """
        session = (turn.scope, turn.session)
        for key, place in [item for item in self.places.items() if item[1].session == session]:
            span = followed(place, turn, sources, copies)
            if span is None or self.book.status(*key).state is State.DEMOTED:
                continue
            start, end = span
            self._apply(self.book.move(key, turn.turn, start, end, kept=length_with_kv(turn)))
            if self.book.lives(key):
                self._seek(key, turn, start, end)

    def holds(self) -> Iterator[tuple[int, tuple[Run, ...]]]:
        """Yield what each claim holds, and the position from which on that is spliced."""
        return ((place.exact, self.book.held(key)) for key, place in self.places.items())

    # ── the cache's side ──────────────────────────────────────────────────────────────────────

    def gave_way(self, keys: Iterable[ClaimKey], request: str = "") -> None:
        """Check the rest of these claims' ranked slots: one eviction may have reached them."""
        gone: list[Run] = []
        for key in keys:
            gone.extend(without(self._missing(key), gone))
        if not gone:
            return
        if not self.watched:
            self.ledger.append(Evicted(request=request, runs=tuple(gone), free=self._free()))
        self._apply(self.book.evicted(gone))
        self._drop_names(gone)

    def _missing(self, key: ClaimKey) -> tuple[Run, ...]:
        """Return what a claim holds and the cache no longer has."""
        place = self.places.get(key)
        if place is None:
            return ()
        held = self.book.held(key)
        gone = self._reach(key, place) - len(self._shelf.slots(place)) // self._page
        return last_pages(held, min(count(held), gone))

    def _free(self) -> int:
        """Return the number of free pages."""
        return self._shelf.free() // self._page

    def passed_over(self, keys: Iterable[ClaimKey]) -> None:
        """Record that an eviction passed over what these claims rank."""
        self.book.tell_pressure(keys)

    def lose(self, slots: Sequence[int], cause: str) -> None:
        """Prepare for the loss of cached slots, whatever the claims on them.

        Claims that hold any of them let go of all they hold, so that the slots can go.

        Args:
            slots: of whole pages.
        """
        runs = self.names.known(slots)
        if not runs:
            return
        free = self._free() + len(slots) // self._page
        self.ledger.append(Lost(runs=runs, cause=cause, free=free))
        self._apply(self.book.lost(runs, cause))
        self.names.forget(runs)

    def lose_all(self, cause: str) -> None:
        """Record that the cache is empty: every claim that held anything is harmed."""
        runs = tuple(run for key in self.places for run in self.book.held(key))
        if runs:
            self.ledger.append(Lost(runs=runs, cause=cause, free=self._free()))
            self._apply(self.book.lost(runs, cause))
        self.names.clear()


def _code_of(field: str) -> ProblemCode:
    if field == "revision":
        return ProblemCode.STALE_REVISION
    return ProblemCode.INVALID_CLAIM if "." in field else ProblemCode.CLAIM_LIMIT
