"""The evicted texts of sessions, and how much of them was needed again, beside the turns.

A text counts once per session, when it is first evicted: those of its tokens that the prompt has
nowhere else. Of these, the ones are *quoted* that the model writes later, word for word, without
having them in its prompt (:mod:`leyline_policies.quotes`); as soon as the text is put back, the
rest is *recalled*. So the two never exceed what was evicted.

The answer of a turn is in the next turn's messages. The prompt that led to it is taken from there,
too: the messages in front of the answer, and the texts that have left them since.

Texts are compared in a thread, one turn at a time, so that no request waits for it::

    settled turn ─▶ waiting turns ─▶ thread: SessionEvictions ─▶ metrics
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

import structlog

from leyline_engine.contract import ProofPlace
from leyline_policies.quotes import WINDOW, Plain, QuoteCounter, plain, texts_in
from leyline_policies.recall import Evicted

from ..model.prepared import Prepared
from ..telemetry.logging import frames_of
from ..telemetry.metrics import Metrics

Owner = tuple[str, str]
"""Tenant and session."""
Fate = Literal["evicted", "recalled", "quoted"]
Tokens = Counter[tuple[Fate, str]]
"""Tokens by what became of them, and by policy."""

MOST_CHARS = 1 << 18
"""Characters of a session's texts in which quotes are looked for."""
LONGEST = 1 << 17
"""Characters of the longest text in which they are, and of the longest text that is searched."""
MOST_PARTS = 1024
"""Texts of a session that are counted."""
MOST_WEIGHT = 1 << 27
"""Approximate bytes of all sessions."""

_PART_WEIGHT = 400
_SESSION_WEIGHT = 1024

log = structlog.get_logger("leyline.recall")

PLACE = "quotes"
"""Name of the texts in proofs."""

MOST_WAITING = 256
"""Turns that wait to be counted; more aren't counted."""


@dataclass(slots=True)
class _Part:
    """One evicted text, without the text."""

    policy: str
    tokens: int
    """Those that are nowhere else in the prompt."""
    per_char: float
    quoted_chars: int = 0
    needed: int = 0
    """Tokens that were counted as quoted or recalled."""


class SessionEvictions:
    """The evicted texts of one session. Not safe for two threads.

    Args:
        late: True if the session had turns that nobody saw here: texts that its first turn here
            shows as evicted don't count, because they may have been counted before.
        level: number of the session's demands to forget by now; turns with fewer may hold text
            that had to go.
    """

    def __init__(self, *, late: bool = False, level: int = 0) -> None:
        self.level = level
        self._late = late
        self._quotes = QuoteCounter(MOST_CHARS)
        self._parts: dict[str, _Part | None] = {}
        """By address; None for a text that doesn't count."""
        self._last: tuple[int, int] | None = None
        """Length of the client's last list, and the fingerprint of its last message."""

    @property
    def weight(self) -> int:
        """Approximate bytes in memory."""
        return _SESSION_WEIGHT + _PART_WEIGHT * len(self._parts) + self._quotes.chars

    @property
    def texts(self) -> int:
        """Number of texts that it has read."""
        return len(self._parts)

    def turn(self, prepared: Prepared, recalled: Iterable[str] = ()) -> Tokens:
        """Return the new tokens of a turn.

        Args:
            recalled: addresses of texts that were put back.
        """
        found: Tokens = Counter()
        new = [part for part in prepared.evicted if part.address not in self._parts]
        self._read_answers(prepared, new, found)
        if self._late:
            self._parts.update((part.address, None) for part in new[:MOST_PARTS])
            self._late = False
        else:
            self._evict(prepared, new, found)
        return found + self.recalled(recalled)

    def recalled(self, addresses: Iterable[str]) -> Tokens:
        """Return the new tokens of texts that were put back."""
        found: Tokens = Counter()
        for address in addresses:
            part = self._parts.get(address)
            if part is not None:
                found["recalled", part.policy] += part.tokens - part.needed
                part.needed = part.tokens
                # From now on the model may have it in its prompt.
                self._quotes.forget(address)
        return +found

    def _evict(self, prepared: Prepared, new: Sequence[Evicted], found: Tokens) -> None:
        new = new[: max(0, MOST_PARTS - len(self._parts))]
        sent = prepared.messages if new else []
        prompt = [*_long(chain.from_iterable(map(texts_in, sent)))]
        for part in new:
            text = plain(part.text)
            tokens = 0
            if WINDOW <= len(text) <= LONGEST:
                chars = self._quotes.evict(part.address, text, prompt).evicted
                tokens = round(part.tokens * chars / len(text))
                if not tokens:
                    self._quotes.forget(part.address)
            elif len(text) > LONGEST:
                tokens = part.tokens
            self._parts[part.address] = _Part(part.policy, tokens, part.tokens / max(1, len(text)))
            found["evicted", part.policy] += tokens

    def _read_answers(self, prepared: Prepared, new: Sequence[Evicted], found: Tokens) -> None:
        """Count quotes in the model's messages since the last turn."""
        for at in self._answers(prepared):
            written = [text[:LONGEST] for text in _long(texts_in(prepared.client[at]))]
            prompt = chain(_texts_before(prepared, at), (plain(part.text) for part in new))
            for address, chars in self._quotes.wrote([*map(Plain, written)], prompt).items():
                part = self._parts[address]
                if part is None:
                    continue
                part.quoted_chars += chars
                quoted = min(part.tokens, round(part.quoted_chars * part.per_char))
                found["quoted", part.policy] += quoted - part.needed
                part.needed = quoted

    def _answers(self, prepared: Prepared) -> list[int]:
        """Return the places of the model's messages that are new in the client's list."""
        prints, last = prepared.client_fingerprints, self._last
        self._last = (len(prints), prints[-1]) if prints else None
        start = _end_of(last, prints)
        if start is None or not self._quotes.chars:
            return []
        places = range(start, len(prints))
        return [at for at in places if prepared.client[at].get("role") == "assistant"]


class EvictionBook:
    """The sessions whose evicted texts are counted.

    If they take too much room, the tenant with the most loses the session that was used least
    recently. Texts that such a session has evicted by its next turn don't count again.
    """

    def __init__(self, most_weight: int = MOST_WEIGHT) -> None:
        self._most = most_weight
        self._sessions: dict[str, OrderedDict[str, SessionEvictions]] = {}
        self._weights: dict[Owner, int] = {}
        self._by_tenant: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._weights)

    @property
    def weight(self) -> int:
        """Approximate bytes of all sessions."""
        return self._by_tenant.total()

    def get(self, owner: Owner) -> SessionEvictions | None:
        """Return a session; None if it isn't known."""
        own = self._sessions.get(owner[0])
        return own.get(owner[1]) if own is not None else None

    def open(self, owner: Owner, *, first: bool) -> SessionEvictions:
        """Return a session, which is used now.

        Args:
            first: True if it begins with this turn.
        """
        known = self.get(owner)
        if known is None:
            return self._put(owner, SessionEvictions(late=not first))
        self._sessions[owner[0]].move_to_end(owner[1])
        return known

    def weigh(self, owner: Owner) -> None:
        """Note a session's new size, and drop others if there are too many."""
        known = self.get(owner)
        if known is None:
            return
        self._by_tenant[owner[0]] += known.weight - self._weights[owner]
        self._weights[owner] = known.weight
        while self.weight > self._most:
            ((tenant, _),) = self._by_tenant.most_common(1)
            self.drop((tenant, next(iter(self._sessions[tenant]))))

    def forget(self, owner: Owner, demands: int) -> None:
        """Drop a session's texts for good, those of turns under way included.

        Args:
            demands: the session's demands by then; see ``Session.demands``.
        """
        known = self.get(owner)
        level = max(demands, known.level if known is not None else 0)
        self.drop(owner)
        self._put(owner, SessionEvictions(late=True, level=level))
        self.weigh(owner)

    def drop(self, owner: Owner) -> None:
        """Drop a session."""
        tenant, session = owner
        if self.get(owner) is None:
            return
        del self._sessions[tenant][session]
        self._by_tenant[tenant] -= self._weights.pop(owner)
        if not self._sessions[tenant]:
            del self._sessions[tenant], self._by_tenant[tenant]

    def _put(self, owner: Owner, made: SessionEvictions) -> SessionEvictions:
        self._sessions.setdefault(owner[0], OrderedDict())[owner[1]] = made
        self._weights[owner] = 0
        return made


def _end_of(last: tuple[int, int] | None, prints: Sequence[int]) -> int | None:
    """Return where a list goes on after an earlier one; None if it doesn't contain its end."""
    if last is None:
        return None
    length, value = last
    if length <= len(prints) and prints[length - 1] == value:
        return length
    return next((at + 1 for at in range(len(prints) - 1, -1, -1) if prints[at] == value), None)


def _texts_before(prepared: Prepared, at: int) -> Iterator[Plain]:
    """Yield the texts in front of a message of the client's."""
    for entry in prepared.sent:
        if entry.client_index is not None and entry.client_index >= at:
            return
        yield from _long(texts_in(entry.message))


def _long(texts: Iterable[Plain]) -> Iterator[Plain]:
    """Yield the texts that are long enough to be compared."""
    return (text for text in texts if len(text) >= WINDOW)


@dataclass(frozen=True, slots=True)
class Work:
    """Something to count in a session."""

    owner: Owner
    count: Callable[[SessionEvictions], Tokens] = field(repr=False)
    """Called in a thread."""
    first: bool = False
    """True if the session begins with it."""
    demands: int | None = None
    """Number of the session's demands when its turn was planned; None for none of text."""


class EvictionRates:
    """Counts what policies evict and what of it is needed again. A
    :class:`~leyline_proxy.turns.ports.KeptText`, which forgets reach."""

    def __init__(self, metrics: Metrics, book: EvictionBook | None = None) -> None:
        self._metrics = metrics
        self._book = EvictionBook() if book is None else book
        self._waiting: deque[Work] = deque()
        self._task: asyncio.Task[None] | None = None
        self._under_way: tuple[Owner, asyncio.Task[Tokens]] | None = None

    def add(self, work: Work) -> None:
        """Count something soon."""
        if len(self._waiting) >= MOST_WAITING:
            return
        self._waiting.append(work)
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def forget(self, tenant: str, session: str, turn: str, demands: int) -> None:
        """Drop a session's texts, and those of its turns that are still under way."""
        self.forgotten((tenant, session), demands + 1)
        await self._idle((tenant, session))

    def forgotten(self, owner: Owner, demands: int) -> None:
        """Drop a session's texts, after so many demands to forget."""
        self._book.forget(owner, demands)
        self._remove(owner)

    async def delete(self, tenant: str, session: str) -> None:
        """Drop a session that is deleted."""
        self._book.drop((tenant, session))
        self._remove((tenant, session))
        await self._idle((tenant, session))

    async def left(self, tenant: str, session: str, demands: int) -> Sequence[ProofPlace]:
        """Look for a session's texts of before its forget."""
        known = self._book.get((tenant, session))
        scanned = known.texts if known is not None else 0
        old = known is not None and known.level < demands
        return (ProofPlace(place=PLACE, scanned=scanned, survivors=scanned if old else 0),)

    async def aclose(self) -> None:
        """Stop counting."""
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _remove(self, owner: Owner) -> None:
        """Remove a session's work."""
        self._waiting = deque(work for work in self._waiting if work.owner != owner)

    async def _idle(self, owner: Owner) -> None:
        """Wait until nothing of a session is compared any more."""
        if self._under_way is not None and self._under_way[0] == owner:
            await asyncio.wait({self._under_way[1]})

    async def _run(self) -> None:
        try:
            while self._waiting:
                await self._count(self._waiting.popleft())
        finally:
            self._task = None

    async def _count(self, work: Work) -> None:
        entry = self._book.open(work.owner, first=work.first)
        if work.demands is not None and work.demands < entry.level:
            return
        counting = asyncio.create_task(asyncio.to_thread(work.count, entry))
        self._under_way = work.owner, counting
        try:
            tokens = await counting
        except Exception as error:  # costs the session's counts, never a turn
            self._book.drop(work.owner)
            frames = frames_of(error)
            log.error("evictions_not_counted", error=type(error).__name__, frames=frames)
            return
        finally:
            self._under_way = None
        if self._book.get(work.owner) is not entry:
            return  # dropped meanwhile
        self._book.weigh(work.owner)
        self._add(work.owner[0], tokens)

    def _add(self, tenant: str, tokens: Tokens) -> None:
        metrics = self._metrics
        by_fate = {
            "evicted": metrics.evicted_tokens,
            "recalled": metrics.evicted_recalled_tokens,
            "quoted": metrics.evicted_quoted_tokens,
        }
        for policy in {policy for _, policy in tokens}:
            for counter in by_fate.values():
                counter.labels(tenant, policy)  # begins at 0: the first event is an increase
        for (fate, policy), count in tokens.items():
            by_fate[fate].labels(tenant, policy).inc(count)
