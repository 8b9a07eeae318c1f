"""What happened to claims, requests and pages, in order: facts, never outcomes. Pure.

Whether an eviction was ordinary, a claim kept its promise or a refusal was due, no event says; the
reader (``reader.py``) finds it out. An event that changes the pool states how many pages are free
after it, so that a trace with a hole contradicts itself.
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
    """Pages."""
    page_size: int
    """Tokens."""
    strict: bool
    """Whether the engine wants more room than a request needs, not merely as much."""
    tree: bool = False
    """Whether a page stays only while all before it do, so that who locks one locks those too; and
    requests take their pages step by step."""
    now_ms: int = 0


class ClaimEvent(Event, frozen=True, kw_only=True):
    """A fact about one claim."""

    tenant: str
    claim: str


class ClaimRequested(ClaimEvent, frozen=True, kw_only=True, tag="claim_requested"):
    """Someone asks for a claim, or for another revision of one."""

    session: str
    kind: str
    priority: int
    source: str
    start: int
    """Tokens, as :class:`~.claim.Predicate` has them."""
    end: int
    required: int
    """Pages that must be resident."""
    ttl_s: int | None
    write_no_admit: bool
    revision: int


class ClaimRefused(ClaimEvent, frozen=True, kw_only=True, tag="claim_refused"):
    """It didn't get into the book."""

    revision: int
    limit: str


class Entered(ClaimEvent, frozen=True, kw_only=True):
    """It is in the book with these terms, instead of an earlier revision if there was one."""

    revision: int
    deadline_ms: int | None


class Moved(ClaimEvent, frozen=True, kw_only=True):
    """An edit of its session put the claim's tokens elsewhere: what is left of them is here."""

    source: str
    start: int
    end: int
    """Tokens, half open; nothing is left where it equals the start."""
    required: int
    """Pages that must be resident from here on."""


class Found(ClaimEvent, frozen=True, kw_only=True):
    """The engine looked: these of the predicate's pages are resident."""

    runs: tuple[Run, ...]


class Locked(ClaimEvent, frozen=True, kw_only=True):
    """Pages that nothing may evict for this claim's sake."""

    runs: tuple[Run, ...]


class Ranked(ClaimEvent, frozen=True, kw_only=True):
    """Pages that are evicted after those of lower priority."""

    runs: tuple[Run, ...]
    priority: int


class Unlocked(ClaimEvent, frozen=True, kw_only=True):
    """The claim's locks are gone."""

    runs: tuple[Run, ...]


class Unranked(ClaimEvent, frozen=True, kw_only=True):
    """The claim's priority is gone from the pages that it still had."""

    runs: tuple[Run, ...]


class Released(ClaimEvent, frozen=True, kw_only=True):
    """The owner let go."""


class Expired(ClaimEvent, frozen=True, kw_only=True):
    """The book took it out at its deadline."""


class Ticked(Event, frozen=True, kw_only=True):
    """Time as it reached the engine: message ``order`` of the clock's."""

    order: int
    now_ms: int


class Arrived(Event, frozen=True, kw_only=True):
    """A request that the engine now deals with."""

    request: str
    tenant: str
    session: str
    source: str
    prompt: int
    """Pages that its prompt fills or begins."""
    pages: int
    """All that it may come to hold: prompt, output by the engine's estimate, reserve."""
    write_no_admit: bool


class RequestRefused(Event, frozen=True, kw_only=True, tag="request_refused"):
    """The engine won't run it."""

    request: str
    matched: tuple[Run, ...]
    """Leading pages of its prompt that are resident, in order."""
    held: int
    """Pages among those that are locked for a claim."""
    protected: int
    """Pages locked for any claim."""
    blocking: tuple[tuple[str, str], ...]
    """(tenant, claim) of those that lock pages which it doesn't match itself."""


class Matched(Event, frozen=True, kw_only=True):
    """Resident pages that a request uses; they stay while it runs."""

    request: str
    runs: tuple[Run, ...]
    """In the order of its prompt."""


class Evicted(Event, frozen=True, kw_only=True):
    """Resident pages that went to make room for a request."""

    request: str
    runs: tuple[Run, ...]
    free: int


class Allocated(Event, frozen=True, kw_only=True):
    """Pages that a request took."""

    request: str
    pages: int
    free: int


class Retained(Event, frozen=True, kw_only=True):
    """Pages of a request that become resident, for later ones to match."""

    request: str
    runs: tuple[Run, ...]
    path: tuple[Run, ...]
    """All pages of the request's source as they are resident now, in order. A page is called by the
    source that first brought it."""
    free: int
    """As before: the pages were the request's, and are the cache's now."""


class Freed(Event, frozen=True, kw_only=True):
    """Pages of a request go back."""

    request: str
    pages: int
    free: int
    ended: bool = True
    """Whether the request did; it holds nothing then."""


class Lost(Event, frozen=True, kw_only=True):
    """Resident pages that are gone though nobody evicted them."""

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
        max_events: older ones are forgotten; what must not be lost goes to ``sink``.
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
        """Number of the newest event, 0 before the first."""
        return self._last

    def __len__(self) -> int:
        return len(self._events)

    def __iter__(self) -> Iterator[AnyEvent]:
        return iter(self._events)

    def behind(
        self, after: int, limit: int, *, tenant: str = "", claim: str = ""
    ) -> tuple[AnyEvent, ...]:
        """Events with a number above ``after``, as far as they are kept; the earliest first.

        Args:
            limit: at most so many.
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
    """One JSON object a line."""
    return msgspec.json.Encoder().encode_lines(events)


def from_jsonl(text: bytes) -> list[AnyEvent]:
    """The events of :func:`to_jsonl`.

    Raises:
        msgspec.DecodeError: a line is no event.
    """
    decoder = msgspec.json.Decoder(AnyEvent)
    found: list[AnyEvent] = decoder.decode_lines(text)
    return found
