"""The claims of one engine: their owners, their pages, and the changes that they ask of the cache.

Pure and without a clock: time is an ordered message (:meth:`ClaimBook.tick`), so that every rank of
an engine comes to the same book. Methods return :class:`Effect`\\s, which the engine carries out
before it does anything else; each is an event already.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from leyline_engine.contract import Claim, ClaimStatus

from .answers import Change, Effect, TickError, UnknownClaimError
from .events import (
    ClaimRefused,
    ClaimRequested,
    Entered,
    EventLedger,
    Expired,
    Found,
    Locked,
    Moved,
    Opened,
    Ranked,
    Released,
    Run,
    Ticked,
    Unlocked,
    Unranked,
)
from .feasibility import Admission, Arithmetic, Demand, check, crowded
from .limits import Accounts, ClaimRefusedError, Limits
from .protection import ClaimKey, Protection
from .runs import count, first_pages, joined, without
from .states import FINAL, Facts, State, Trigger, advance


@dataclass(slots=True)
class ClaimEntry:
    """The book's record of one claim; the book alone changes it."""

    claim: Claim
    required: int
    """Pages that must be resident."""
    state: State = State.REQUESTED
    deadline_ms: int | None = None
    entered_ms: int = 0
    runs: tuple[Run, ...] = ()
    """Pages locked or ranked for it."""
    support: int = 0
    """Number of those pages that the predicate doesn't ask for, but depends on."""
    floor: int = 0
    """Number of pages below which the predicate fails."""
    locked: bool = False
    sources: tuple[str, ...] = ()
    """Sources of the pages that it holds."""
    hits: int = 0
    pressure: int = 0

    @property
    def key(self) -> ClaimKey:
        return self.claim.tenant, self.claim.id

    def status(self, now_ms: int, page_size: int) -> ClaimStatus:
        """Return the claim and its state."""
        deadline = self.deadline_ms
        return ClaimStatus(
            claim=self.claim,
            state=self.state,
            remaining_ms=None if deadline is None else max(0, deadline - now_ms),
            age_ms=now_ms - self.entered_ms,
            resident_tokens=max(0, count(self.runs) - self.support) * page_size,
            required_tokens=self.required * page_size,
            hits=self.hits,
            pressure=self.pressure,
        )


def requested(claim: Claim, required: int) -> ClaimRequested:
    """Return the event that a claim begins with.

    Args:
        required: pages that must be resident.
    """
    predicate = claim.predicate
    return ClaimRequested(
        tenant=claim.tenant,
        claim=claim.id,
        session=claim.session,
        kind=claim.kind,
        priority=claim.priority,
        source=predicate.source,
        start=predicate.start,
        end=predicate.end,
        required=required,
        ttl_s=claim.ttl_s,
        write_no_admit=claim.write_no_admit,
        revision=claim.revision,
    )


MAX_ENDED = 4096
"""Number of ended claims that are remembered, over all tenants; the oldest go first."""


class ClaimBook:
    """The claims of one engine.

    Args:
        usable: pages of the pool.
        now_ms: the clock's time now; every later time comes by :meth:`tick`.
        tree: see :class:`~.events.Opened`.
        usable_tokens: tokens of the pool, if they don't fill its last page.
    """

    def __init__(
        self,
        usable: int,
        arithmetic: Arithmetic,
        ledger: EventLedger,
        *,
        limits: Limits | None = None,
        now_ms: int = 0,
        tree: bool = False,
        usable_tokens: int | None = None,
    ) -> None:
        self.usable = usable
        self._usable_tokens = usable_tokens or usable * arithmetic.page_size
        self.arithmetic = arithmetic
        self.now_ms = now_ms
        self._limits = limits or Limits()
        self._events = ledger
        self._protection = Protection()
        self._live: dict[ClaimKey, ClaimEntry] = {}
        self._holders: dict[str, dict[ClaimKey, None]] = {}
        """Pages that are locked or ranked, by source, and for whom."""
        self._ended: OrderedDict[ClaimKey, ClaimStatus] = OrderedDict()
        self._accounts = Accounts(usable, arithmetic.page_size)
        self._order = 0
        ledger.append(
            Opened(
                usable=usable,
                page_size=arithmetic.page_size,
                strict=arithmetic.strict,
                now_ms=now_ms,
                tree=tree,
            )
        )

    # ── the owner's side ──────────────────────────────────────────────────────────────────────

    def submit(
        self, claim: Claim, length: int | None, *, whole_pages: bool = False
    ) -> tuple[Effect, ...]:
        """Take a new claim, or a later revision of one; :meth:`seek` comes next.

        Args:
            length: tokens of the predicate's source; None if the engine doesn't know it.
            whole_pages: True if the cache keeps none of a source's last page unless it is full.

        Returns:
            Effects that give back what the earlier revision held.

        Raises:
            ClaimRefusedError: names the limit or field; an earlier revision stays as it is.
        """
        key = (claim.tenant, claim.id)
        known = self._live.get(key)
        kept = length if whole_pages else None
        required = claim.predicate.required_pages(self.arithmetic.page_size, kept)
        self._events.append(requested(claim, required))
        try:
            self._check(claim, required, known, length)
        except ClaimRefusedError as refusal:
            self._events.append(
                ClaimRefused(
                    tenant=claim.tenant,
                    claim=claim.id,
                    revision=claim.revision,
                    limit=refusal.field,
                )
            )
            if known is None and key not in self._ended:
                rejected = advance(State.REQUESTED, Trigger.REFUSE, Facts())
                self._remember(key, ClaimStatus(claim=claim, state=rejected, cause=refusal.field))
            raise
        entry = ClaimEntry(claim, required)
        if known is None:
            entry.state = advance(State.REQUESTED, Trigger.ENTER, Facts())
        else:
            entry.state = advance(known.state, Trigger.REVISE, Facts(protected=known.locked))
            self._accounts.remove(known.claim, known.required, known.deadline_ms)
        self._ended.pop(key, None)
        self._enter(entry)
        return self._let_go(known) if known else ()

    def _check(
        self, claim: Claim, required: int, known: ClaimEntry | None, length: int | None
    ) -> None:
        latest = self._revision(claim, known)
        if claim.revision <= latest:
            raise ClaimRefusedError(
                "revision", f"{claim.revision} is not later than {latest}, which is in the book"
            )
        if length is None:
            raise ClaimRefusedError("predicate.source", "the engine retains no such turn")
        if claim.predicate.end > length:
            raise ClaimRefusedError(
                "predicate.end",
                f"{claim.predicate.end} is past the end of the source, {length} tokens",
            )
        if not required:
            raise self._less_than_a_page(length)
        replaced = None if known is None else (known.claim, known.required)
        self._accounts.check(self._limits, claim, required, replaced)

    def _less_than_a_page(self, length: int) -> ClaimRefusedError:
        page = self.arithmetic.page_size
        last = length // page * page
        fix = f"begin before {last}, or claim a later turn" if last else "claim a later turn"
        return ClaimRefusedError(
            "predicate.start",
            f"the engine keeps whole pages of {page} tokens, and those from {last} to the source's "
            f"end, {length}, fill none: {fix}",
        )

    def _revision(self, claim: Claim, known: ClaimEntry | None) -> int:
        """Return the latest revision that took effect, also of an ended claim; 0 if none."""
        if known is not None:
            return known.claim.revision
        ended = self._ended.get((claim.tenant, claim.id))
        return ended.claim.revision if ended and ended.state is not State.REJECTED else 0

    def release(self, tenant: str, claim: str) -> tuple[Effect, ...]:
        """End a claim at its owner's wish; an ended claim stays as it ended."""
        entry = self._find(tenant, claim)
        if entry is None:
            return ()
        state = advance(entry.state, Trigger.RELEASE, Facts(protected=entry.locked))
        self._events.append(Released(tenant=tenant, claim=claim))
        return self._end(entry, state)

    def demote(self, tenant: str, claim: str) -> tuple[Effect, ...]:
        """Give up a hard claim's locks; its pages keep its priority.

        Raises:
            UnknownClaimError: not one of this tenant's.
            TransitionError: it has no locks.
        """
        entry = self._find(tenant, claim)
        if entry is None:
            raise UnknownClaimError
        entry.state = advance(entry.state, Trigger.UNLOCK, Facts(protected=entry.locked))
        runs = entry.runs
        return (*self._let_go(entry), *self._hold(entry, runs, lock=False))

    def status(self, tenant: str, claim: str) -> ClaimStatus:
        """Return the status of a tenant's claim, also for a while after its end.

        Raises:
            UnknownClaimError: not one of this tenant's.
        """
        entry = self._find(tenant, claim)
        return self._ended[tenant, claim] if entry is None else self._status(entry)

    def live(self, tenant: str = "") -> tuple[ClaimStatus, ...]:
        """Return the live claims, oldest first: a tenant's, or all."""
        return tuple(
            self._status(entry)
            for entry in self._live.values()
            if tenant in ("", entry.claim.tenant)
        )

    def _find(self, tenant: str, claim: str) -> ClaimEntry | None:
        """Return a live claim; None for one that has ended."""
        entry = self._live.get((tenant, claim))
        if entry is None and (tenant, claim) not in self._ended:
            raise UnknownClaimError
        return entry

    # ── the engine's side ─────────────────────────────────────────────────────────────────────

    def tick(self, order: int, now_ms: int) -> tuple[Effect, ...]:
        """Take the clock's next message: claims past their deadline expire, earliest first.

        Raises:
            TickError: not the next one, or back in time.
        """
        if order != self._order + 1:
            raise TickError(f"message {order} of the clock came after {self._order}")
        if now_ms < self.now_ms:
            raise TickError(f"the clock went back from {self.now_ms} to {now_ms} ms")
        self._order, self.now_ms = order, now_ms
        self._events.append(Ticked(order=order, now_ms=now_ms))
        effects: list[Effect] = []
        while (key := self._accounts.due(now_ms)) is not None:
            entry = self._live[key]
            state = advance(entry.state, Trigger.EXPIRE, Facts(protected=entry.locked))
            self._events.append(Expired(tenant=entry.claim.tenant, claim=entry.claim.id))
            effects.extend(self._end(entry, state))
        return tuple(effects)

    def seek(
        self, key: ClaimKey, resident: Sequence[Run], support: Sequence[Run] = ()
    ) -> tuple[Effect, ...]:
        """Record that the engine has looked for an accepted claim's pages.

        Args:
            resident: the predicate's resident pages, in order.
            support: pages before them that must stay for them to stay.
        """
        entry = self._live[key]
        holds = count(resident) >= entry.required
        state = advance(entry.state, Trigger.SEEK, Facts(holds=holds))
        self._events.append(Found(tenant=key[0], claim=key[1], runs=tuple(resident)))
        if state in FINAL:
            return self._end(entry, state, f"{count(resident)} of {entry.required} pages resident")
        entry.state = state
        if not entry.claim.hard:
            entry.support, entry.floor = 0, entry.required
            return self._hold(entry, tuple(resident), lock=False)
        # A hard claim locks its own pages and no neighbour.
        runs = joined(support, first_pages(resident, entry.required))
        entry.support, entry.floor = count(support), count(runs)
        return self._hold(entry, runs, lock=True)

    def move(
        self, key: ClaimKey, source: str, start: int, end: int, *, kept: int | None = None
    ) -> tuple[Effect, ...]:
        """Record that an edit of the claim's session moved its tokens; :meth:`seek` comes next.

        A demoted claim stays where it is. Tokens that lie across more pages than before require
        more of them as far as the limits allow.

        Args:
            start, end: the remaining tokens, as a span of ``source``; none if equal.
            kept: see :meth:`~.contract.Predicate.page_span`; a claim that has none of these pages
                has no tokens left.

        Returns:
            Effects that give back what the claim held at the old place.
        """
        entry = self._live[key]
        if entry.state is State.DEMOTED:
            return ()
        claim, required = entry.claim, 0
        if end > start:
            predicate = msgspec.structs.replace(
                claim.predicate, source=source, start=start, end=end
            )
            claim = msgspec.structs.replace(claim, predicate=predicate)
            required = self._affordable(
                entry, predicate.required_pages(self.arithmetic.page_size, kept)
            )
        if not required:
            start = end
        facts = Facts(holds=required > 0, protected=entry.locked)
        state = advance(entry.state, Trigger.MOVE, facts)
        self._events.append(
            Moved(
                tenant=key[0], claim=key[1], source=source, start=start, end=end, required=required
            )
        )
        if state in FINAL:
            return self._end(entry, state, "edited away")
        effects = self._let_go(entry)
        self._accounts.remove(entry.claim, entry.required, entry.deadline_ms)
        entry.claim, entry.required, entry.state = claim, required, state
        self._accounts.add(claim, required, entry.deadline_ms)
        return effects

    def _affordable(self, entry: ClaimEntry, required: int) -> int:
        """Return ``required``, or the pages of before if a limit allows no more."""
        if required > entry.required:
            try:
                self._accounts.check(
                    self._limits, entry.claim, required, (entry.claim, entry.required)
                )
            except ClaimRefusedError:
                return entry.required
        return required

    def evicted(self, runs: Sequence[Run]) -> tuple[Effect, ...]:
        """Record that pages went to a request. The engine must have recorded it as an event.

        Raises:
            TransitionError: one of them was locked; nothing was changed.
        """
        return self._gone(runs, Trigger.EVICT, "")

    def lost(self, runs: Sequence[Run], cause: str) -> tuple[Effect, ...]:
        """Record that pages are gone without an eviction. The engine must have recorded it."""
        return self._gone(runs, Trigger.LOSE, cause)

    def _gone(self, runs: Sequence[Run], trigger: Trigger, cause: str) -> tuple[Effect, ...]:
        hit: list[tuple[ClaimEntry, tuple[Run, ...], State]] = []
        for key in dict.fromkeys(k for run in runs for k in self._holders.get(run.source, ())):
            entry = self._live[key]
            left = without(entry.runs, runs)
            if left != entry.runs:
                facts = Facts(holds=count(left) >= entry.floor, protected=entry.locked)
                hit.append((entry, left, advance(entry.state, trigger, facts)))
        effects: list[Effect] = []
        for entry, left, state in hit:
            entry.runs, entry.state = left, state
            if state in FINAL:
                effects.extend(self._end(entry, state, cause))
        return tuple(effects)

    def waiting(self, source: str) -> tuple[ClaimKey, ...]:
        """Return the accepted claims on a source whose pages haven't been looked for yet."""
        return tuple(
            key
            for key, entry in self._live.items()
            if entry.state is State.ACCEPTED and entry.claim.predicate.source == source
        )

    def admits(self, tenant: str, session: str) -> bool:
        """Return True if KV that this session's next request computes may be kept for reuse."""
        return self._accounts.admits(tenant, session)

    def check(self, demand: Demand) -> Admission:
        """Check if a request can run beside the locked claims."""
        return check(demand, self._protection, self.arithmetic, self._usable_tokens, self.now_ms)

    def lives(self, key: ClaimKey) -> bool:
        """Return True if a claim is in the book and hasn't ended."""
        return key in self._live

    def held(self, key: ClaimKey) -> tuple[Run, ...]:
        """Return the pages that are locked or ranked for a live claim, in order."""
        return self._live[key].runs

    def support(self, key: ClaimKey) -> int:
        """Return the number of those pages that come before the predicate's own."""
        return self._live[key].support

    def unheld(self, runs: Iterable[Run]) -> tuple[Run, ...]:
        """Return those of the pages that no claim holds."""
        left: list[Run] = []
        for run in runs:
            held = (self._live[key].runs for key in self._holders.get(run.source, ()))
            left.extend(without([run], [other for others in held for other in others]))
        return tuple(left)

    def crowded(self, demand: Demand) -> Admission:
        """See :func:`~.feasibility.crowded`."""
        return crowded(demand, self._protection, self.arithmetic, self._usable_tokens)

    def tell_hit(self, key: ClaimKey) -> None:
        """Record that a request matched everything that a live claim holds."""
        self._live[key].hits += 1

    def tell_pressure(self, keys: Iterable[ClaimKey]) -> None:
        """Record that live claims were in a request's way, or that an eviction passed over them."""
        for key in keys:
            self._live[key].pressure += 1

    @property
    def next_deadline_ms(self) -> int | None:
        """Time at which the next claim expires."""
        return self._accounts.next_deadline_ms

    @property
    def protected_pages(self) -> int:
        return self._protection.pages

    # ── accounts ──────────────────────────────────────────────────────────────────────────────

    def _enter(self, entry: ClaimEntry) -> None:
        claim = entry.claim
        entry.entered_ms = self.now_ms
        if claim.ttl_s is not None:
            entry.deadline_ms = self.now_ms + 1000 * claim.ttl_s
        self._accounts.add(claim, entry.required, entry.deadline_ms)
        self._live[entry.key] = entry
        self._events.append(
            Entered(
                tenant=claim.tenant,
                claim=claim.id,
                revision=claim.revision,
                deadline_ms=entry.deadline_ms,
            )
        )

    def _end(self, entry: ClaimEntry, state: State, cause: str = "") -> tuple[Effect, ...]:
        effects = self._let_go(entry)
        self._accounts.remove(entry.claim, entry.required, entry.deadline_ms)
        del self._live[entry.key]
        entry.state = state
        self._remember(entry.key, msgspec.structs.replace(self._status(entry), cause=cause))
        return effects

    def _remember(self, key: ClaimKey, status: ClaimStatus) -> None:
        self._ended[key] = status
        self._ended.move_to_end(key)
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def _hold(self, entry: ClaimEntry, runs: tuple[Run, ...], *, lock: bool) -> tuple[Effect, ...]:
        tenant, claim = entry.key
        entry.runs, entry.locked = runs, lock
        entry.sources = tuple(dict.fromkeys(run.source for run in runs))
        for source in entry.sources:
            self._holders.setdefault(source, {})[entry.key] = None
        if lock:
            self._events.append(Locked(tenant=tenant, claim=claim, runs=runs))
            self._protection.hold(entry.key, runs, entry.deadline_ms)
            return (Effect(Change.LOCK, entry.key, runs),)
        priority = entry.claim.priority
        self._events.append(Ranked(tenant=tenant, claim=claim, runs=runs, priority=priority))
        return (Effect(Change.RANK, entry.key, runs, priority),)

    def _let_go(self, entry: ClaimEntry) -> tuple[Effect, ...]:
        tenant, claim = entry.key
        runs, was_locked = entry.runs, entry.locked
        entry.runs, entry.locked = (), False
        for source in entry.sources:
            holders = self._holders[source]
            del holders[entry.key]
            if not holders:
                del self._holders[source]
        entry.sources = ()
        if was_locked:
            self._protection.let_go(entry.key)
        if not runs:
            return ()
        if was_locked:
            self._events.append(Unlocked(tenant=tenant, claim=claim, runs=runs))
            return (Effect(Change.UNLOCK, entry.key, runs),)
        self._events.append(Unranked(tenant=tenant, claim=claim, runs=runs))
        return (Effect(Change.UNRANK, entry.key, runs),)

    def _status(self, entry: ClaimEntry) -> ClaimStatus:
        return entry.status(self.now_ms, self.arithmetic.page_size)
