"""Requests for the records of turns, with a short time for each turn and their own breaker.

A record matters much less than its answer: an engine without working records continues to serve,
and turns end without them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from enum import StrEnum

from leyline_engine.contract import TurnRecord

from ..errors import ProxyError
from .breaker import Breaker, BreakerState
from .client import UpstreamClient

BUDGET_S = 0.5
"""Default seconds for all record requests of one turn."""


class Came(StrEnum):
    """The way that a turn's record came, or the reason that it didn't."""

    ANSWER = "answer"
    """The record came with the answer."""
    ASKED = "asked"
    """The proxy asked the engine for it."""
    ABSENT = "absent"
    """The engine has none, or no complete one."""
    LATE = "late"
    """The engine didn't answer in time, or not at all."""
    NOT_ASKED = "not_asked"
    """Earlier failures stopped the requests for a while."""


def ignored(_: Came) -> None:
    """Count nothing."""


class RecordRoute:
    """An engine's records.

    Args:
        client: has its own connections.
        breaker: only for these requests; another one judges whether the engine serves.
        budget_s: for all requests of one turn.
        count: called with the way that each record came.
    """

    def __init__(
        self,
        client: UpstreamClient,
        breaker: Breaker,
        *,
        budget_s: float = BUDGET_S,
        count: Callable[[Came], None] = ignored,
    ) -> None:
        self._client = client
        self._breaker = breaker
        self._budget_s = budget_s
        self._count = count

    @property
    def given_up(self) -> bool:
        """True if requests fail, so few or none are sent."""
        return self._breaker.state is not BreakerState.CLOSED

    def came(self) -> None:
        """Count a record that came with its answer."""
        self._count(Came.ANSWER)

    def deadline(self) -> float:
        """Return the end of a turn's requests that begin now, by the loop's clock."""
        return asyncio.get_running_loop().time() + self._budget_s

    async def ask(
        self, message_id: str, waits_s: Sequence[float], deadline: float, *, due: bool
    ) -> TurnRecord | None:
        """Return the record, complete if that comes in time; None if there is none.

        Args:
            waits_s: pauses before each request for a record that may still be written.
            due: True if there must be one, so its absence is a failure.
        """
        if not self._breaker.admits:
            self._count(Came.NOT_ASKED)
            return None
        question = _Question(self._client, message_id)
        self._breaker.begin()
        told = False
        try:
            came = await question.put(waits_s, deadline)
            if came is Came.LATE or (due and question.record is None):
                self._breaker.failed()
            else:
                self._breaker.succeeded()
            told = True
        finally:
            if not told:
                self._breaker.given_up()
        if due or question.record is not None:
            self._count(came)
        return question.record

    async def aclose(self) -> None:
        """Close all connections."""
        await self._client.aclose()


class _Question:
    """One turn's request, repeated until the record is complete."""

    def __init__(self, client: UpstreamClient, message_id: str) -> None:
        self._client = client
        self._message_id = message_id
        self._waits_for_engine = False
        self.record: TurnRecord | None = None

    async def put(self, waits_s: Sequence[float], deadline: float) -> Came:
        """Return the result; never raises for the engine's faults."""
        try:
            async with asyncio.timeout_at(deadline):
                for pause in waits_s:
                    await asyncio.sleep(pause)
                    if await self._complete():
                        return Came.ASKED
        except ProxyError:
            return Came.LATE
        except TimeoutError:
            if self._waits_for_engine:
                return Came.LATE
        return Came.ABSENT

    async def _complete(self) -> bool:
        self._waits_for_engine = True
        found = await self._client.record(self._message_id)
        self._waits_for_engine = False
        self.record = found or self.record
        return found is not None and (found.finished or found.receipt.refused is not None)
