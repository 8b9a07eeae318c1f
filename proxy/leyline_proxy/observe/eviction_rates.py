"""Counts of evicted tokens that were needed again, beside the turns.

Texts are compared in a thread, one turn at a time, so that no request waits for it::

    settled turn ─▶ waiting turns ─▶ thread: SessionEvictions ─▶ metrics
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog

from leyline_engine.contract import ProofPlace

from ..telemetry.logging import frames_of
from ..telemetry.metrics import Metrics
from .eviction_book import EvictionBook, Owner, SessionEvictions, Tokens

log = structlog.get_logger("leyline.recall")

PLACE = "quotes"
"""Name of the texts in proofs."""
MOST_WAITING = 256
"""Turns that wait to be counted; more aren't counted."""


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
