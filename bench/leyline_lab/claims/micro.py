"""MicroRuntime: a block allocator with claims and nothing else. No model, no scheduler, no clock.

It takes requests by size, lends them blocks, keeps what they leave for later requests to match, and
evicts the least recently used blocks when it runs out: lower ranks first, a sequence from its end.
It shows the effect of claims on an allocator without an engine in the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from leyline_engine.claims.answers import Change, Effect
from leyline_engine.claims.book import ClaimBook
from leyline_engine.claims.events import (
    Allocated,
    AnyEvent,
    Arrived,
    EventLedger,
    Evicted,
    Freed,
    Lost,
    Matched,
    RequestRefused,
    Retained,
    Run,
)
from leyline_engine.claims.feasibility import Admission, Arithmetic, Demand, Feasibility
from leyline_engine.claims.limits import Limits
from leyline_engine.claims.protection import ClaimKey
from leyline_engine.claims.runs import pages_of, runs_of
from leyline_engine.contract import Claim, ClaimRefusal

PageKey = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Request:
    """A request as the allocator sees it; its tokens are the first of ``source``."""

    name: str
    tenant: str
    session: str
    source: str
    prompt_tokens: int
    max_new_tokens: int = 0
    write_no_admit: bool = False


class Start(StrEnum):
    """The result of a request's start."""

    RUNNING = "running"
    REFUSED = "refused"
    """Refused because of a claim; a retry is no use before that claim ends."""
    BUSY = "busy"
    """Fits beside the claims once other running requests have ended. Nothing was done."""
    TOO_LARGE = "too_large"


@dataclass(slots=True)
class _Page:
    block: int
    used: int
    users: int = 0
    locks: set[ClaimKey] = field(default_factory=set)
    ranks: dict[ClaimKey, int] = field(default_factory=dict)

    @property
    def evictable(self) -> bool:
        return not self.users and not self.locks

    @property
    def rank(self) -> int:
        return max(self.ranks.values(), default=0)


@dataclass(slots=True)
class _Running:
    request: Request
    matched: int
    blocks: list[int]
    admit: bool


class MicroRuntime:
    """An engine's memory, page by page.

    Args:
        usable: pages of the pool.
        page_size: tokens.
        sink: see :class:`~.events.EventLedger`.
    """

    def __init__(
        self,
        usable: int,
        *,
        page_size: int = 16,
        limits: Limits | None = None,
        sink: Callable[[AnyEvent], None] | None = None,
        now_ms: int = 0,
    ) -> None:
        self.page_size = page_size
        self.arithmetic = Arithmetic(page_size, strict=False, whole_pages=True)
        self.ledger = EventLedger(sink=sink)
        self.book = ClaimBook(usable, self.arithmetic, self.ledger, limits=limits, now_ms=now_ms)
        self._free = list(range(usable))
        self._pages: dict[PageKey, _Page] = {}
        self._running: dict[str, _Running] = {}
        self._lengths: dict[str, int] = {}
        self._uses = 0

    @property
    def unit(self) -> int:
        """See :attr:`.litmus.Runtime.unit`."""
        return self.page_size

    # ── requests ──────────────────────────────────────────────────────────────────────────────

    def start(self, request: Request) -> tuple[Start, Admission]:
        """Admit a request, or refuse it at once if it can't run.

        Raises:
            ValueError: a request of this name runs already.
        """
        if request.name in self._running:
            raise ValueError(f"request {request.name} runs already")
        matched = self._match(request)
        demand = Demand(
            request.tenant,
            request.prompt_tokens,
            request.max_new_tokens,
            _front(request.source, matched),
        )
        admission = self.book.check(demand)
        if admission.feasibility is Feasibility.TOO_LARGE:
            return Start.TOO_LARGE, admission
        pages = (admission.needed + admission.held) // self.page_size
        if admission.feasibility is Feasibility.BLOCKED:
            self._arrive(request, pages, admit=self._admits(request))
            self._refuse(request, matched, admission)
            return Start.REFUSED, admission
        short = pages - matched - len(self._free)
        victims = self._victims(short, request.source, matched)
        if len(victims) < short:
            return Start.BUSY, admission
        admit = self._admits(request)
        self._arrive(request, pages, admit=admit)
        self._use(request, matched)
        self._evict(request, victims)
        blocks = [self._free.pop() for _ in range(pages - matched)]
        self._running[request.name] = _Running(request, matched, blocks, admit)
        self._lengths.setdefault(request.source, 0)
        self.ledger.append(Allocated(request=request.name, pages=len(blocks), free=len(self._free)))
        return Start.RUNNING, admission

    def serve(self, request: Request) -> ClaimRefusal | None:
        """Run a request to its end, or return why it can't run before a claim ends.

        Raises:
            RuntimeError: it can't run for another reason.
        """
        start, admission = self.start(request)
        match start:
            case Start.RUNNING:
                self.finish(request.name)
                return None
            case Start.REFUSED:
                return admission.refusal
            case _:
                raise RuntimeError(f"request {request.name} is {start}")

    def edit(self, name: str, old: str, new: str, start: int, end: int) -> None:
        """See :meth:`.litmus.Runtime.edit`.

        Raises:
            NotImplementedError: blocks have no content to splice.
        """
        raise NotImplementedError("a block allocator doesn't splice")

    def finish(self, name: str) -> None:
        """End a request with all the output that it asked for; its KV becomes resident.

        Raises:
            KeyError: no such request runs.
        """
        running = self._running.pop(name)
        request = running.request
        for page in range(running.matched):
            self._pages[request.source, page].users -= 1
        if running.admit:
            self._retain(running)
        self._free.extend(running.blocks)
        self.ledger.append(Freed(request=name, pages=len(running.blocks), free=len(self._free)))
        if not self._computes(request.source):
            for key in self.book.waiting(request.source):
                self._seek(key)

    def _match(self, request: Request) -> int:
        matched = 0
        whole = request.prompt_tokens // self.page_size
        while matched < whole and (request.source, matched) in self._pages:
            matched += 1
        return matched

    def _admits(self, request: Request) -> bool:
        allowed = self.book.admits(request.tenant, request.session)
        return allowed and not request.write_no_admit

    def _arrive(self, request: Request, pages: int, *, admit: bool) -> None:
        self.ledger.append(
            Arrived(
                request=request.name,
                tenant=request.tenant,
                session=request.session,
                source=request.source,
                prompt=request.prompt_tokens // self.page_size,
                pages=pages,
                write_no_admit=not admit,
            )
        )

    def _refuse(self, request: Request, matched: int, admission: Admission) -> None:
        self.ledger.append(
            RequestRefused(
                request=request.name,
                matched=_front(request.source, matched),
                held=admission.held // self.page_size,
                protected=admission.protected // self.page_size,
                blocking=admission.blocking,
            )
        )

    def _use(self, request: Request, matched: int) -> None:
        if not matched:
            return
        self._uses += 1
        for page in range(matched):
            found = self._pages[request.source, page]
            found.users += 1
            found.used = self._uses
        runs = _front(request.source, matched)
        self.ledger.append(Matched(request=request.name, runs=runs))

    def _victims(self, pages: int, source: str, matched: int) -> list[PageKey]:
        """Return the pages to evict for that many pages; fewer if there aren't enough."""
        if pages <= 0:
            return []
        order = sorted(
            (page.rank, page.used, key[0], -key[1])
            for key, page in self._pages.items()
            if page.evictable and not (key[0] == source and key[1] < matched)
        )
        return [(name, -number) for _, _, name, number in order[:pages]]

    def _evict(self, request: Request, victims: Sequence[PageKey]) -> None:
        if not victims:
            return
        runs = self._drop(victims)
        self.ledger.append(Evicted(request=request.name, runs=runs, free=len(self._free)))
        self._apply(self.book.evicted(runs))

    def _drop(self, keys: Iterable[PageKey]) -> tuple[Run, ...]:
        gone = list(keys)
        self._free.extend(self._pages.pop(key).block for key in gone)
        return runs_of(gone)

    def _retain(self, running: _Running) -> None:
        request = running.request
        tokens = request.prompt_tokens + min(request.max_new_tokens, self.arithmetic.clip_output)
        self._uses += 1
        kept: list[PageKey] = []
        for number in range(running.matched, -(-tokens // self.page_size)):
            key = (request.source, number)
            if key not in self._pages:  # another request has left it here meanwhile
                self._pages[key] = _Page(running.blocks.pop(), self._uses)
                kept.append(key)
        self._lengths[request.source] = max(self._lengths[request.source], tokens)
        if kept:
            length = -(-self._lengths[request.source] // self.page_size)
            path = _front(request.source, length)
            self.ledger.append(
                Retained(request=request.name, runs=runs_of(kept), path=path, free=len(self._free))
            )

    # ── claims ────────────────────────────────────────────────────────────────────────────────

    def claim(self, claim: Claim) -> None:
        """Take a claim or a later revision, and look at once for tokens that aren't being computed.

        Raises:
            ClaimRefusedError: names the limit or field.
        """
        source = claim.predicate.source
        length = self._lengths.get(source)
        if length is not None:
            running = [r.request for r in self._running.values() if r.request.source == source]
            length = max([length, *(r.prompt_tokens + r.max_new_tokens for r in running)])
        self._apply(self.book.submit(claim, length))
        if not self._computes(source):
            self._seek((claim.tenant, claim.id))

    def _computes(self, source: str) -> bool:
        """Return True if a running request will leave pages of a source in the cache."""
        return any(run.request.source == source and run.admit for run in self._running.values())

    def _seek(self, key: ClaimKey) -> None:
        predicate = self.book.status(*key).claim.predicate
        first, end = predicate.page_span(self.page_size)
        source = predicate.source
        found = [(source, page) for page in range(first, end) if (source, page) in self._pages]
        self._apply(self.book.seek(key, runs_of(found)))

    def release(self, tenant: str, claim: str) -> None:
        """See :meth:`ClaimBook.release`."""
        self._apply(self.book.release(tenant, claim))

    def demote(self, tenant: str, claim: str) -> None:
        """See :meth:`ClaimBook.demote`."""
        self._apply(self.book.demote(tenant, claim))

    def tick(self, order: int, now_ms: int) -> None:
        """See :meth:`ClaimBook.tick`."""
        self._apply(self.book.tick(order, now_ms))

    def lose(self, run: Run, cause: str) -> None:
        """Drop resident pages of a run, whoever locked them; pages that a request uses stay."""
        keys = [key for key in pages_of([run]) if key in self._pages and not self._pages[key].users]
        if keys:
            runs = self._drop(keys)
            self.ledger.append(Lost(runs=runs, cause=cause, free=len(self._free)))
            self._apply(self.book.lost(runs, cause))

    def _apply(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            for key in pages_of(effect.runs):
                page = self._pages[key]
                match effect.change:
                    case Change.LOCK:
                        page.locks.add(effect.claim)
                    case Change.UNLOCK:
                        page.locks.discard(effect.claim)
                    case Change.RANK:
                        page.ranks[effect.claim] = effect.priority
                    case Change.UNRANK:
                        page.ranks.pop(effect.claim, None)

    # ── accounts ──────────────────────────────────────────────────────────────────────────────

    @property
    def free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def resident(self, source: str | None = None) -> tuple[Run, ...]:
        """Return the pages kept for later requests, of one source or of all."""
        return runs_of(key for key in self._pages if source in (None, key[0]))

    def locked(self) -> frozenset[PageKey]:
        """Return the pages that some claim locks."""
        return frozenset(key for key, page in self._pages.items() if page.locks)

    def blocks(self) -> list[int]:
        """Return every block of its one owner (free, resident, running), sorted: the whole pool."""
        held = [page.block for page in self._pages.values()]
        running = [block for run in self._running.values() for block in run.blocks]
        return sorted([*self._free, *held, *running])


def _front(source: str, pages: int) -> tuple[Run, ...]:
    """Return the first pages of a source."""
    return (Run(source, 0, pages),) if pages else ()
