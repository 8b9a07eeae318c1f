"""Later requests to engines for the results of forgets that were pending or unknown."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from leyline_engine.contract import Receipt, TurnRecord

from ..errors import ProxyError
from .facts import TurnEdits
from .records import Record, TurnFacts, erasure_record, receipt_record

Ask = Callable[[str], Awaitable[TurnRecord | None]]
End = Callable[[Receipt | None], Record | None]
"""Returns the final record, if any, from the last known receipt."""

MAX_OPEN = 1024
"""Largest number of forgets followed up; any others remain pending in the log."""

_FIRST_S = 0.1
_LAST_S = 30.0
_TRIES = 14
"""Over about five minutes."""


@dataclass(frozen=True, slots=True)
class _Open:
    message_id: str
    ask: Ask
    end: End
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
        """Follow up a turn's forget until it is closed or the tries are used up."""
        facts = replace(facts, edits=TurnEdits())  # the turn's record has the hashes of their texts

        def end(receipt: Receipt | None) -> Record:
            return receipt_record(facts, receipt, time.time())

        self._watch(_Open(facts.message_id, ask, end, _first(), known=facts.receipt))

    def watch_erasure(self, owner: tuple[str, str], engine: str, known: Receipt, ask: Ask) -> None:
        """Follow up a forget that was carried to an engine until it is closed."""

        def end(receipt: Receipt | None) -> Record | None:
            if not is_closed(receipt):
                return None
            return erasure_record(*owner, engine, "erased", time.time())

        self._watch(_Open(known.message_id, ask, end, _first(), known=known))

    def _watch(self, each: _Open) -> None:
        if len(self._open) >= MAX_OPEN:
            return
        self._open.append(each)
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
            record = await each.ask(each.message_id)
        except ProxyError:
            record = None
        known = record.receipt if record is not None else each.known
        if is_closed(known) or each.tries + 1 >= _TRIES:
            told = each.end(known)
            if told is not None:
                self._tell(told)
            return
        pause = min(_LAST_S, 2 * each.pause_s)
        due = time.monotonic() + each.pause_s
        self._open.append(replace(each, due=due, pause_s=pause, tries=each.tries + 1, known=known))


def is_closed(receipt: Receipt | None) -> bool:
    """Return True if a forget is known to be carried out in full."""
    return receipt is not None and receipt.forgot is not None and not receipt.forgot.pending


def _first() -> float:
    return time.monotonic() + _FIRST_S
