"""Questions for the records of turns: a short time for each turn, and a breaker of their own.

A record is worth little beside the answer that it belongs to: an engine whose records don't come
serves on, and turns end without.
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
"""For all questions of one turn, where nothing else is set."""


class Came(StrEnum):
    """How the record of a turn came, or why it didn't."""

    ANSWER = "answer"
    """With the answer."""
    ASKED = "asked"
    """The engine was asked for it."""
    ABSENT = "absent"
    """The engine has none, or none that is complete."""
    LATE = "late"
    """The engine didn't answer in time, or not at all."""
    NOT_ASKED = "not_asked"
    """After such failures nothing is asked for a while."""


def ignored(_: Came) -> None:
    """Counts nothing."""


class RecordRoute:
    """An engine's records.

    Args:
        client: has connections that nothing else needs.
        breaker: of these questions alone; whether the engine serves is another's to judge.
        budget_s: for all questions of one turn.
        count: is told how each record came.
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
        """Whether questions fail, so that few are asked or none."""
        return self._breaker.state is not BreakerState.CLOSED

    def came(self) -> None:
        """A record has come with its answer."""
        self._count(Came.ANSWER)

    def deadline(self) -> float:
        """When the questions of a turn end that begin now, by the loop's clock."""
        return asyncio.get_running_loop().time() + self._budget_s

    async def ask(
        self, message_id: str, waits_s: Sequence[float], deadline: float, *, due: bool
    ) -> TurnRecord | None:
        """The record, complete if that comes in time; None if there is none.

        Args:
            waits_s: pauses before each question for a record that may still be written.
            due: there must be one, so that its absence is a failure.
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
    """One turn's question, put again until the record is complete."""

    def __init__(self, client: UpstreamClient, message_id: str) -> None:
        self._client = client
        self._message_id = message_id
        self._waits_for_engine = False
        self.record: TurnRecord | None = None

    async def put(self, waits_s: Sequence[float], deadline: float) -> Came:
        """What came of it; never raises for what the engine does."""
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
