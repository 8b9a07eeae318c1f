"""Events of claims, requests and pages, in order: facts, never outcomes. Pure.

No event says if an eviction was ordinary, a claim kept its promise or a refusal was due; the reader
(``reader.py``) finds that out. An event that changes the pool gives the free pages after it, so a
trace with a hole contradicts itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import msgspec

MAX_EVENTS = 65_536


class Run(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Pages ``[start, end)`` of a source."""

    source: str
    start: int
    end: int

    @property
    def pages(self) -> int:
        return self.end - self.start


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=str.lower):
    """One fact. ``seq`` counts from 1 without a gap, per engine."""

    seq: int = 0


class Opened(Event, frozen=True, kw_only=True):
    """The pool, empty. The first event of every engine."""

    usable: int
    """Pages of the pool."""
    page_size: int
    """Tokens per page."""
    strict: bool
    """True if the engine wants more room than a request needs, not merely as much."""
    tree: bool = False
    """True if a page stays only while all pages before it do: a lock holds those too, and requests
    take their pages step by step."""
    now_ms: int = 0


class ClaimEvent(Event, frozen=True, kw_only=True):
    """A fact about one claim."""

    tenant: str
    claim: str


class ClaimRequested(ClaimEvent, frozen=True, kw_only=True, tag="claim_requested"):
    """A request for a claim, or for another revision of one."""

    session: str
    kind: str
    priority: int
    source: str
    start: int
    """First token, as in :class:`~.claim.Predicate`."""
    end: int
    required: int
    """Pages that must be resident."""
    ttl_s: int | None
    write_no_admit: bool
    revision: int


class ClaimRefused(ClaimEvent, frozen=True, kw_only=True, tag="claim_refused"):
    """The claim didn't get into the book."""

    revision: int
    limit: str


class Entered(ClaimEvent, frozen=True, kw_only=True):
    """The claim is in the book with these terms, which replace those of an earlier revision."""

    revision: int
    deadline_ms: int | None


class Moved(ClaimEvent, frozen=True, kw_only=True):
    """An edit of its session moved the claim's tokens: the rest of them is here."""

    source: str
    start: int
    end: int
    """End of the tokens, half open; nothing is left if it equals the start."""
    required: int
    """Pages that must be resident from now on."""


class Found(ClaimEvent, frozen=True, kw_only=True):
    """The engine found these of the predicate's pages resident."""

    runs: tuple[Run, ...]


class Locked(ClaimEvent, frozen=True, kw_only=True):
    """Pages that nothing may evict, for this claim's sake."""

    runs: tuple[Run, ...]


class Ranked(ClaimEvent, frozen=True, kw_only=True):
    """Pages that are evicted after those of lower priority."""

    runs: tuple[Run, ...]
    priority: int


class Unlocked(ClaimEvent, frozen=True, kw_only=True):
    """The claim's locks are gone."""

    runs: tuple[Run, ...]


class Unranked(ClaimEvent, frozen=True, kw_only=True):
    """The claim's priority is gone from the pages that still had it."""

    runs: tuple[Run, ...]


class Released(ClaimEvent, frozen=True, kw_only=True):
    """The owner released the claim."""


class Expired(ClaimEvent, frozen=True, kw_only=True):
    """The book ended the claim at its deadline."""


class Ticked(Event, frozen=True, kw_only=True):
    """The clock's message ``order``, with the time as it reached the engine."""

    order: int
    now_ms: int


class Arrived(Event, frozen=True, kw_only=True):
    """The engine begins to handle a request."""

    request: str
    tenant: str
    session: str
    source: str
    prompt: int
    """Pages that its prompt fills or begins."""
    pages: int
    """Pages that it may need in all: prompt, output by the engine's estimate, and reserve."""
    write_no_admit: bool


class RequestRefused(Event, frozen=True, kw_only=True, tag="request_refused"):
    """The engine won't run a request."""

    request: str
    matched: tuple[Run, ...]
    """Resident leading pages of its prompt, in order."""
    held: int
    """Number of those that are locked for a claim."""
    protected: int
    """Number of pages locked for any claim."""
    blocking: tuple[tuple[str, str], ...]
    """(tenant, claim) of those that lock pages which the request doesn't match."""


class Matched(Event, frozen=True, kw_only=True):
    """Resident pages that a request uses; they stay while it runs."""

    request: str
    runs: tuple[Run, ...]
    """Pages in the order of its prompt."""


class Evicted(Event, frozen=True, kw_only=True):
    """Resident pages that were evicted to make room for a request."""

    request: str
    runs: tuple[Run, ...]
    free: int


class Allocated(Event, frozen=True, kw_only=True):
    """Pages that a request took."""

    request: str
    pages: int
    free: int


class Retained(Event, frozen=True, kw_only=True):
    """Pages of a request that become resident, for later requests to match."""

    request: str
    runs: tuple[Run, ...]
    path: tuple[Run, ...]
    """All resident pages of the request's source, in order. A page is named after the source that
    first brought it."""
    free: int
    """Free pages, unchanged: the pages were the request's, and are the cache's now."""


class Freed(Event, frozen=True, kw_only=True):
    """A request gives pages back."""

    request: str
    pages: int
    free: int
    ended: bool = True
    """True if the request ended; it holds nothing then."""


class Lost(Event, frozen=True, kw_only=True):
    """Resident pages that are gone without an eviction."""

    runs: tuple[Run, ...]
    cause: str
    free: int


AnyEvent = (
    Opened
    | ClaimRequested
    | ClaimRefused
    | Entered
    | Moved
    | Found
    | Locked
    | Ranked
    | Unlocked
    | Unranked
    | Released
    | Expired
    | Ticked
    | Arrived
    | RequestRefused
    | Matched
    | Evicted
    | Allocated
    | Retained
    | Freed
    | Lost
)


class EventLedger:
    """The newest events of one engine, numbered.

    Args:
        max_events: older ones are forgotten; use ``sink`` to lose none.
        sink: called with every event, before anything else happens.
    """

    def __init__(
        self, *, max_events: int = MAX_EVENTS, sink: Callable[[AnyEvent], None] | None = None
    ) -> None:
        self._events: deque[AnyEvent] = deque(maxlen=max_events)
        self._sink = sink
        self._last = 0

    def append(self, event: AnyEvent) -> None:
        """Number an event and keep it."""
        self._last += 1
        numbered = msgspec.structs.replace(event, seq=self._last)
        self._events.append(numbered)
        if self._sink is not None:
            self._sink(numbered)

    @property
    def last(self) -> int:
        """Number of the newest event; 0 before the first."""
        return self._last

    def __len__(self) -> int:
        return len(self._events)

    def __iter__(self) -> Iterator[AnyEvent]:
        return iter(self._events)

    def behind(
        self, after: int, limit: int, *, tenant: str = "", claim: str = ""
    ) -> tuple[AnyEvent, ...]:
        """Return the events with a number above ``after`` that are still kept, earliest first.

        Args:
            limit: maximum number of events.
            tenant, claim: only those of this tenant's claims, or of this one claim.
        """
        first = self._last - len(self._events)
        newer = islice(self._events, max(0, after - first), None)
        chosen = (event for event in newer if _concerns(event, tenant, claim))
        return tuple(islice(chosen, limit))


def _concerns(event: AnyEvent, tenant: str, claim: str) -> bool:
    if not tenant:
        return True
    if not isinstance(event, ClaimEvent):
        return False
    return event.tenant == tenant and claim in ("", event.claim)


def to_jsonl(events: Iterable[AnyEvent]) -> bytes:
    """Return the events as JSON, one object a line."""
    return msgspec.json.Encoder().encode_lines(events)


def from_jsonl(text: bytes) -> list[AnyEvent]:
    """Read the events of :func:`to_jsonl`.

    Raises:
        msgspec.DecodeError: a line is no event.
    """
    decoder = msgspec.json.Decoder(AnyEvent)
    found: list[AnyEvent] = decoder.decode_lines(text)
    return found
