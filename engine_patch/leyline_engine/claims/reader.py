"""What happened to claims and requests, read from events and nothing else. Pure.

The reader replays the facts in accounts of its own and names the outcomes. It shares no code with
the book or an engine, so that neither vouches for itself. A trace in which a fact is missing or
stands in the wrong place contradicts itself; its verdict is void.
"""

from __future__ import annotations

from collections.abc import Iterable

from . import events as ev
from .trace import ClaimTrace, Phase, RequestTrace, Trace, VoidTraceError, demand, spread, terms
from .verdict import Finding, Outcome, Verdict


def read(events: Iterable[ev.AnyEvent]) -> Verdict:
    """Name every outcome of a trace that begins with an engine's first event."""
    reader = _Reader()
    number = 0
    try:
        for number, event in enumerate(events, start=1):
            demand(event.seq == number, f"its number is {event.seq}")
            reader.take(event)
    except VoidTraceError as contradiction:
        return Verdict(void=f"event {number}: {contradiction}")
    return reader.verdict()


class _Reader:
    def __init__(self) -> None:
        self._trace = Trace()
        self._found: list[Finding] = []

    def verdict(self) -> Verdict:
        return Verdict(findings=tuple(self._found), balance=self._trace.balance())

    def _say(self, outcome: Outcome, subject: str, pages: int = 0, detail: str = "") -> None:
        self._found.append(Finding(outcome, subject, pages, detail))

    def take(self, event: ev.AnyEvent) -> None:
        """Account for one fact."""
        self._trace.check_turn(event)
        match event:
            case ev.Opened():
                self._trace.open(event)
            case ev.ClaimRequested() | ev.ClaimRefused() | ev.Entered():
                self._answer(event)
            case ev.Found() | ev.Locked() | ev.Ranked():
                self._materialise(event)
            case ev.Unlocked() | ev.Unranked():
                self._let_go(event)
            case ev.Released() | ev.Expired():
                self._end(event)
            case ev.Ticked():
                self._trace.tick(event)
            case ev.Arrived() | ev.RequestRefused() | ev.Matched() | ev.Allocated():
                self._start(event)
            case ev.Evicted():
                self._evict(event)
            case ev.Retained() | ev.Freed():
                self._finish(event)
            case ev.Lost():
                self._lose(event)

    # ── claims ────────────────────────────────────────────────────────────────────────────────

    def _answer(self, event: ev.ClaimRequested | ev.ClaimRefused | ev.Entered) -> None:
        trace, key = self._trace, (event.tenant, event.claim)
        known = trace.claims.get(key)
        if isinstance(event, ev.ClaimRequested):
            trace.asked = event
            return
        asked, trace.asked = trace.asked, None
        if asked is None:
            raise VoidTraceError("an answer to no request for a claim")
        demand(
            (asked.tenant, asked.claim, asked.revision) == (*key, event.revision),
            "the answer to another request for a claim",
        )
        stale = known is not None and known.revision >= event.revision
        if isinstance(event, ev.ClaimRefused):
            demand((event.limit == "revision") == stale, "the revision is not what refused it")
            outcome = Outcome.STALE_REVISION if stale else Outcome.CLAIM_REFUSAL
            said = f"{event.limit}; {terms(asked)}"
            self._say(outcome, trace.name(key), asked.required, said)
            return
        lived = known is not None and known.phase.lives
        # An ended claim's revision counts only while the book remembers it.
        demand(not (stale and lived), "an older revision replaced a later one")
        due = None if asked.ttl_s is None else trace.now_ms + 1000 * asked.ttl_s
        demand(event.deadline_ms == due, "the deadline is not the clock's time and the TTL")
        claim = ClaimTrace.of(asked, due, trace.page_size)
        if known is not None and known.phase.lives:
            self._say(Outcome.REVISION, trace.name(key), len(known.held))
            trace.owe(known)
            claim.held, claim.locked = known.held, known.locked
        trace.claims[key] = claim
        self._say(Outcome.ACCEPTANCE, trace.name(key), claim.required, terms(asked))

    def _materialise(self, event: ev.Found | ev.Locked | ev.Ranked) -> None:
        trace, claim = self._trace, self._trace.claim(event)
        name, pages = trace.name((event.tenant, event.claim)), spread(event.runs)
        if isinstance(event, ev.Found):
            demand(claim.phase is Phase.ACCEPTED and not claim.held, "nothing to look for")
            there = {key for key in claim.span() if key in trace.resident}
            demand(pages == there, "what was found is not what is resident")
            if len(pages) < claim.required:
                claim.phase = Phase.FAILED
                self._say(Outcome.MATERIALIZATION_FAILURE, name, len(pages))
            else:
                claim.phase, claim.found = Phase.FOUND, pages
                trace.next_of = (event.tenant, event.claim)
            return
        trace.next_of = None
        locks = isinstance(event, ev.Locked)
        demand(claim.phase in (Phase.FOUND, Phase.DEMOTED), "its pages weren't looked for")
        demand(pages <= claim.found and bool(pages), "pages that weren't found")
        demand(not claim.held, "it holds pages already")
        if isinstance(event, ev.Ranked):
            demand(event.priority == claim.priority, "not its priority")
            demand(pages == claim.found, "not all that was found")
            demand(claim.kind == "soft" or claim.phase is Phase.DEMOTED, "a hard claim unlocked")
        else:
            demand(claim.kind == "hard", "a soft claim that locks")
            demand(len(pages) == claim.required, "not as many pages as it requires")
        claim.held, claim.locked = pages, locks
        if claim.phase is Phase.FOUND:
            claim.phase = Phase.MATERIALIZED
            self._say(Outcome.HARD_CLAIM if locks else Outcome.SOFT_CLAIM, name, len(pages))

    def _let_go(self, event: ev.Unlocked | ev.Unranked) -> None:
        trace, claim = self._trace, self._trace.claim(event)
        key, pages = (event.tenant, event.claim), spread(event.runs)
        demand(bool(pages) and pages == claim.held, "not the pages that it holds")
        demand(claim.locked is isinstance(event, ev.Unlocked), "the wrong way of holding them")
        if key in trace.owed:
            trace.owed.discard(key)
        else:
            demand(claim.locked and claim.phase is Phase.MATERIALIZED, "no reason to let go")
            claim.phase, claim.found = Phase.DEMOTED, pages
            trace.next_of = key
            self._say(Outcome.DEMOTION, trace.name(key), len(pages))
        claim.held, claim.locked = frozenset(), False

    def _end(self, event: ev.Released | ev.Expired) -> None:
        trace, claim = self._trace, self._trace.claim(event)
        demand(claim.phase.lives, "the end of a claim that has ended")
        expired = isinstance(event, ev.Expired)
        if expired:
            demand(trace.overdue(claim), "its time hadn't come")
        claim.phase = Phase.EXPIRED if expired else Phase.RELEASED
        name = trace.name((event.tenant, event.claim))
        self._say(Outcome.EXPIRY if expired else Outcome.RELEASE, name, len(claim.held))
        trace.owe(claim)

    # ── requests ──────────────────────────────────────────────────────────────────────────────

    def _start(self, event: ev.Arrived | ev.RequestRefused | ev.Matched | ev.Allocated) -> None:
        trace = self._trace
        if isinstance(event, ev.Arrived):
            demand(event.request not in trace.requests, "a request that is there already")
            demand(event.pages <= trace.usable, "a request that no pool could hold")
            trace.requests[event.request] = RequestTrace(event)
            trace.starting = event.request
            return
        request = trace.request(event)
        if isinstance(event, ev.Matched):
            run, arrived = event.run, request.arrived
            demand(not request.matched and not request.evicted, "matched too late")
            demand(run.source == arrived.source and run.start == 0, "matched in another source")
            demand(run.end <= arrived.prompt, "matched beyond the prompt")
            demand(spread([run]) <= trace.resident.keys(), "matched what is not resident")
            request.matched = run.end
            trace.touch(spread([run]))
            return
        trace.starting = None
        if isinstance(event, ev.RequestRefused):
            self._refuse(event, request)
            return
        demand(event.pages == request.arrived.pages - request.matched, "not what was missing")
        trace.account(-event.pages, event.free)
        request.taken = event.pages
        self._say(Outcome.ADMISSION, event.request, event.pages)

    def _refuse(self, event: ev.RequestRefused, request: RequestTrace) -> None:
        trace, arrived = self._trace, request.arrived
        own = spread([ev.Run(arrived.source, 0, event.matched)])
        locks = {key: claim.held for key, claim in trace.claims.items() if claim.locked}
        locked = frozenset().union(*locks.values())
        demand(not request.matched, "refused after it matched")
        demand(own <= trace.resident.keys(), "matched what is not resident")
        demand(event.held == len(locked & own), "not what it shares with claims")
        demand(event.protected == len(locked), "not what is locked")
        blocking = {key for key, pages in locks.items() if pages - own}
        demand(set(event.blocking) == blocking, "not the claims that block it")
        room = trace.usable - len(locked)
        needed = arrived.pages - event.held + trace.strict
        demand(needed > room, "refused though it fits")
        names = ", ".join(sorted(map(trace.name, blocking)))
        self._say(Outcome.ACTIVE_REFUSAL, event.request, needed - room, names)
        del trace.requests[event.request]

    def _evict(self, event: ev.Evicted) -> None:
        trace, pages = self._trace, spread(event.runs)
        trace.request(event).evicted = True
        demand(not pages & trace.locked(), "a locked page was evicted")
        used, ranks = trace.take_out(pages, event.free), trace.ranks()
        claimed = {key for key in pages if key in ranks}
        for source in sorted({source for source, _ in pages - claimed}):
            gone = sum(key[0] == source for key in pages - claimed)
            self._say(Outcome.ORDINARY_EVICTION, source, gone, event.request)
        for key, claim in trace.claims.items():
            if claim.locked or not claim.held or claim.priority == 0:
                continue
            stays = claim.held & trace.resident.keys() - trace.in_use()
            oldest = min((trace.resident[page] for page in stays), default=trace.uses + 1)
            if not claim.decided and any(
                used[page] > oldest and ranks.get(page, 0) < claim.priority for page in pages
            ):
                claim.decided = True
                self._say(Outcome.SOFT_PRIORITY, trace.name(key), len(stays), event.request)
        for key, _ in trace.hit(pages, Phase.EVICTED):
            self._say(Outcome.SOFT_EVICTION, trace.name(key), 0, event.request)

    def _finish(self, event: ev.Retained | ev.Freed) -> None:
        trace = self._trace
        request = trace.request(event)
        demand(request.taken is not None, "the end of a request that didn't run")
        arrived = request.arrived
        if isinstance(event, ev.Retained):
            pages = spread(event.runs)
            own = spread([ev.Run(arrived.source, request.matched, arrived.pages)])
            demand(not arrived.write_no_admit, "kept what must not be admitted")
            demand(not request.kept and bool(pages), "kept twice")
            demand(pages <= own, "kept what it didn't compute")
            demand(not pages & trace.resident.keys(), "kept what was there")
            request.kept = len(pages)
            trace.touch(pages)
            return
        demand(event.pages == (request.taken or 0) - request.kept, "not all that it took")
        trace.account(event.pages, event.free)
        del trace.requests[event.request]
        outcome = Outcome.WRITE_NO_ADMIT if arrived.write_no_admit else Outcome.SERVICE
        self._say(outcome, event.request, request.kept)

    def _lose(self, event: ev.Lost) -> None:
        trace, pages = self._trace, spread(event.runs)
        trace.take_out(pages, event.free)
        for source in sorted({source for source, _ in pages}):
            gone = sum(key[0] == source for key in pages)
            self._say(Outcome.LOSS, source, gone, event.cause)
        for key, gone in trace.hit(pages, Phase.HARMED):
            self._say(Outcome.HARM, trace.name(key), gone, event.cause)
