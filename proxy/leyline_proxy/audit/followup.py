"""Asks engines again what forgets came to that were pending, or unknown, when a turn ended."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from leyline_engine.contract import Receipt, TurnRecord

from ..errors import ProxyError
from .records import Record, TurnFacts, receipt_record

Ask = Callable[[str], Awaitable[TurnRecord | None]]

MAX_OPEN = 1024
"""Forgets that are asked after; of more, the log says to the end that they are pending."""

_FIRST_S = 0.1
_LAST_S = 30.0
_TRIES = 14
"""Over some five minutes."""


@dataclass(frozen=True, slots=True)
class _Open:
    facts: TurnFacts
    ask: Ask
    due: float
    pause_s: float = _FIRST_S
    tries: int = 0
    known: Receipt | None = None


class FollowUps:
    """Forgets that aren't closed yet."""

    def __init__(self, tell: Callable[[Record], None]) -> None:
        self._tell = tell
        self._open: deque[_Open] = deque()
        self._task: asyncio.Task[None] | None = None

    def watch(self, facts: TurnFacts, ask: Ask) -> None:
        """Ask after a turn's forget until it is closed, or nobody can tell."""
        if len(self._open) >= MAX_OPEN:
            return
        self._open.append(_Open(facts, ask, time.monotonic() + _FIRST_S, known=facts.receipt))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    async def aclose(self) -> None:
        """Stop asking."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    async def _run(self) -> None:
        while self._open:
            now = time.monotonic()
            await asyncio.sleep(max(0.0, min(each.due for each in self._open) - now))
            for _ in range(len(self._open)):
                each = self._open.popleft()
                if each.due > time.monotonic():
                    self._open.append(each)
                    continue
                await self._look(each)

    async def _look(self, each: _Open) -> None:
        try:
            record = await each.ask(each.facts.message_id)
        except ProxyError:
            record = None
        known = record.receipt if record is not None else each.known
        closed = known is not None and known.forgot is not None and not known.forgot.pending
        if closed or each.tries + 1 >= _TRIES:
            self._tell(receipt_record(each.facts, known, time.time()))
            return
        pause = min(_LAST_S, 2 * each.pause_s)
        due = time.monotonic() + each.pause_s
        self._open.append(replace(each, due=due, pause_s=pause, tries=each.tries + 1, known=known))
