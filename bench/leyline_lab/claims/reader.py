"""The reader: outcomes of claims and requests, from events and nothing else. Pure.

The reader replays the facts in accounts of its own and names the outcomes. It shares no code with
the book or an engine, so that neither vouches for itself. A trace in which a fact is missing or
misplaced contradicts itself; its verdict is void.
"""

from __future__ import annotations

from collections.abc import Iterable

from leyline_engine.claims import events as ev

from .trace import (
    ClaimTrace,
    Phase,
    RequestTrace,
    Trace,
    VoidTraceError,
    demand,
    listed,
    spread,
    terms,
)
from .verdict import Outcome, TraceFinding, TraceVerdict


def read(events: Iterable[ev.AnyEvent]) -> TraceVerdict:
    """Name every outcome of a trace that begins with an engine's first event."""
    reader = _Reader()
    number = 0
    try:
        for number, event in enumerate(events, start=1):
            demand(event.seq == number, f"its number is {event.seq}")
            reader.take(event)
    except VoidTraceError as contradiction:
        return TraceVerdict(void=f"event {number}: {contradiction}")
    return reader.verdict()


class _Reader:
    def __init__(self) -> None:
        self._trace = Trace()
        self._found: list[TraceFinding] = []

    def verdict(self) -> TraceVerdict:
        return TraceVerdict(findings=tuple(self._found), balance=self._trace.balance())

    def _say(self, outcome: Outcome, subject: str, pages: int = 0, detail: str = "") -> None:
        self._found.append(TraceFinding(outcome, subject, pages, detail))

    def take(self, event: ev.AnyEvent) -> None:
        """Account for one fact."""
        self._trace.check_turn(event)
        match event:
            case ev.Opened():
                self._trace.open(event)
            case ev.ClaimRequested() | ev.ClaimRefused() | ev.Entered():
                self._answer(event)
            case ev.Moved():
                self._move(event)
            case ev.Found():
                self._find(event)
            case ev.Locked() | ev.Ranked():
                self._hold(event)
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
        claim = ClaimTrace.of(asked, due)
        if known is not None and known.phase.lives:
            self._say(Outcome.REVISION, trace.name(key), len(known.held))
            trace.owe(known)
            claim.held, claim.locked = known.held, known.locked
        trace.claims[key] = claim
        self._say(Outcome.ACCEPTANCE, trace.name(key), claim.required, terms(asked))

    def _move(self, event: ev.Moved) -> None:
        trace, claim = self._trace, self._trace.claim(event)
        demand(claim.phase in (Phase.ACCEPTED, Phase.MATERIALIZED), "nothing to move")
        before, left = claim.end - claim.start, event.end - event.start
        demand(0 <= left <= before, "more tokens than the claim had")
        name = trace.name((event.tenant, event.claim))
        if left == 0:
            claim.phase = Phase.HARMED
            self._say(Outcome.HARM, name, len(claim.held), "edited away")
        else:
            claim.phase = Phase.ACCEPTED
            claim.source, claim.start, claim.end = event.source, event.start, event.end
            claim.required = event.required
            first, last = claim.pages(trace.page_size)
            demand(0 < event.required <= last - first, "not what its span can hold")
            self._say(Outcome.MOVE if left == before else Outcome.SHRINK, name, event.required)
        trace.owe(claim)

    def _find(self, event: ev.Found) -> None:
        trace, claim = self._trace, self._trace.claim(event)
        pages = spread(event.runs)
        demand(claim.phase is Phase.ACCEPTED and not claim.held, "nothing to look for")
        there = {page for page in trace.span(claim) if page in trace.resident}
        demand(pages == there, "what was found is not what is resident")
        if len(pages) < claim.required:
            claim.phase = Phase.FAILED
            name = trace.name((event.tenant, event.claim))
            self._say(Outcome.MATERIALIZATION_FAILURE, name, len(pages))
        else:
            claim.phase, claim.found = Phase.FOUND, pages
            trace.next_of = (event.tenant, event.claim)

    def _hold(self, event: ev.Locked | ev.Ranked) -> None:
        trace, claim = self._trace, self._trace.claim(event)
        name, pages = trace.name((event.tenant, event.claim)), spread(event.runs)
        trace.next_of = None
        demand(claim.phase in (Phase.FOUND, Phase.DEMOTED), "its pages weren't looked for")
        demand(not claim.held, "it holds pages already")
        locks = isinstance(event, ev.Locked)
        if isinstance(event, ev.Ranked):
            demand(event.priority == claim.priority, "not its priority")
            demand(pages == claim.found, "not all that was found")
            demand(claim.kind == "soft" or claim.phase is Phase.DEMOTED, "a hard claim unlocked")
            if claim.phase is Phase.FOUND:
                claim.floor = claim.required
        else:
            demand(claim.kind == "hard", "a soft claim that locks")
            support = frozenset(trace.support(claim))
            demand(support <= pages and pages - support <= claim.found, "pages that weren't found")
            demand(len(pages - support) == claim.required, "not as many pages as it requires")
            claim.floor = len(pages)
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
            trace.requests[event.request] = RequestTrace(event, since=trace.births)
            trace.starting = event.request
            return
        request = trace.request(event)
        if isinstance(event, ev.Matched):
            self._match(event, request)
            return
        trace.starting = None
        if isinstance(event, ev.RequestRefused):
            self._refuse(event, request)
            return
        demand(event.pages > 0, "no pages were taken")
        missing = request.arrived.pages - len(request.matched)
        begins, taken = request.taken is None, (request.taken or 0) + event.pages
        # One by one where pages are taken step by step.
        whole = taken <= missing if trace.tree else begins and taken == missing
        demand(whole, "not what was missing")
        trace.account(-event.pages, event.free)
        request.taken = taken
        if begins:
            self._say(Outcome.ADMISSION, event.request, event.pages)

    def _match(self, event: ev.Matched, request: RequestTrace) -> None:
        trace, arrived, pages = self._trace, request.arrived, listed(event.runs)
        early = not request.matched and not request.evicted and request.taken is None
        demand(early, "matched too late")
        demand(0 < len(pages) <= arrived.prompt, "matched beyond the prompt")
        demand(spread(event.runs) <= trace.resident.keys(), "matched what is not resident")
        if not trace.tree:
            front = (ev.Run(arrived.source, 0, len(pages)),)
            demand(event.runs == front, "matched in another source")
        request.matched = pages
        trace.touch(spread(event.runs))

    def _refuse(self, event: ev.RequestRefused, request: RequestTrace) -> None:
        trace, arrived = self._trace, request.arrived
        own = spread(event.matched)
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
        request = trace.request(event)
        demand(not pages & trace.locked(), "a locked page was evicted")
        used, ranks = trace.take_out(pages, event.free), trace.ranks()
        claimed = {key for key in pages if key in ranks}
        for source in sorted({source for source, _ in pages - claimed}):
            gone = sum(key[0] == source for key in pages - claimed)
            further = source in request.evicted
            outcome = Outcome.FURTHER_EVICTION if further else Outcome.ORDINARY_EVICTION
            self._say(outcome, source, gone, event.request)
        request.evicted.update(source for source, _ in pages)
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
        arrived, taken = request.arrived, request.taken or 0
        if isinstance(event, ev.Retained):
            self._retain(event, request)
            return
        left = taken - request.kept - event.pages
        demand(left == 0 if event.ended else left >= 0, "not all that it took")
        trace.account(event.pages, event.free)
        request.taken = taken - event.pages
        request.given_back += event.pages
        if event.ended:
            del trace.requests[event.request]
            outcome = Outcome.WRITE_NO_ADMIT if arrived.write_no_admit else Outcome.SERVICE
            self._say(outcome, event.request, request.kept)

    def _retain(self, event: ev.Retained, request: RequestTrace) -> None:
        trace, arrived = self._trace, request.arrived
        path, pages = listed(event.path), spread(event.runs)
        own = {(arrived.source, place) for place in range(len(request.matched), arrived.pages)}
        demand(not arrived.write_no_admit, "kept what must not be admitted")
        # In a tree, all of it may have been resident; the path is new all the same.
        demand(trace.tree or (bool(pages) and not request.kept), "kept twice")
        demand(pages <= own, "kept what it didn't compute")
        demand(not pages & trace.resident.keys(), "kept what was there")
        demand(pages <= set(path), "kept what is not on its path")
        if trace.tree:
            demand(set(path) <= pages | trace.resident.keys(), "a path with holes")
            old = {page for page in set(path) - pages if trace.born[page] <= request.since}
            # Tokens computed though they were resident: the last of a prompt, at least.
            computed = request.kept + len(pages) + len(old - set(request.matched))
            taken = (request.taken or 0) + request.given_back
            demand(computed <= taken, "goes on from what it didn't match")
            placed = {page for place, page in enumerate(path) if page == (arrived.source, place)}
            demand(pages <= placed, "kept in another place")
        trace.account(0, event.free)
        request.kept += len(pages)
        demand(request.kept <= (request.taken or 0), "kept more than it took")
        trace.paths[arrived.source] = path
        trace.bear(pages)

    def _lose(self, event: ev.Lost) -> None:
        trace, pages = self._trace, spread(event.runs)
        trace.take_out(pages, event.free)
        for run in event.runs:
            self._say(Outcome.LOSS, run.source, run.pages, f"{event.cause}, from {run.start}")
        for key, gone in trace.hit(pages, Phase.HARMED):
            self._say(Outcome.HARM, trace.name(key), gone, event.cause)
