"""Commands, in order, and the time, from the HTTP process to the schedulers: about claims, and
questions about the ledger.

Every message carries its number and the time, and comes to every rank between the same requests; so
all ranks see the same claims expire at the same point. Between commands a message is sent whenever
a claim's time is up.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import msgspec

from leyline_engine.contract import ClaimReply, LedgerAnswer

log = logging.getLogger(__name__)

_PATIENCE_S = 30.0
"""Seconds to wait for an answer; a scheduler answers between two forwards."""
_TICK_S = 1.0


class ClaimMessage(msgspec.Struct, frozen=True):
    """The HTTP process's message to the schedulers; each advances the clock."""

    order: int
    now_ms: int
    command: str = ""
    """JSON of a :data:`~.contract.ClaimCommand`; empty for the time alone."""
    question: str = ""
    """JSON of a :class:`~.contract.LedgerQuestion`."""


class ClaimAnswer(msgspec.Struct, frozen=True):
    """A scheduler's answer."""

    order: int
    """Number of the message."""
    reply: ClaimReply
    deadline_ms: int | None = None
    """Time at which the next claim expires, by the clock of the messages."""
    ledger: LedgerAnswer | None = None
    """Answer to the question; None if there was none, or if the session is another replica's."""


Send = Callable[[ClaimMessage], Awaitable[ClaimAnswer]]


class SchedulerSilentError(Exception):
    """The scheduler didn't answer in time, or couldn't."""


class ClaimClock:
    """Numbers messages, and makes time pass while claims have deadlines.

    Args:
        send: sends a message to all ranks, and returns the answer of one of them.
        now_ns: a clock that never goes back.
    """

    def __init__(self, send: Send, *, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._send = send
        self._now_ns = now_ns
        self._began_ns = now_ns()
        self._order = 0
        self._turn = asyncio.Lock()
        self._ticking: asyncio.Task[None] | None = None
        self._deadline_ms: int | None = None
        self._under_way: set[asyncio.Task[ClaimAnswer]] = set()

    async def command(self, text: str) -> ClaimReply:
        """Send a command, and return its reply.

        Raises:
            SchedulerSilentError: no answer came.
        """
        return (await self._shielded(command=text)).reply

    async def question(self, text: str) -> LedgerAnswer:
        """Send a question about the ledger, and return its answer.

        Raises:
            SchedulerSilentError: no answer came.
        """
        answer = (await self._shielded(question=text)).ledger
        if answer is None:
            raise SchedulerSilentError("no scheduler answers for this session")
        return answer

    async def _shielded(self, *, command: str = "", question: str = "") -> ClaimAnswer:
        # A client that hangs up must not leave a number unused, or an answer to the next command.
        task = asyncio.create_task(self._exchange(command, question))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return await asyncio.shield(task)

    async def _exchange(self, command: str = "", question: str = "") -> ClaimAnswer:
        async with self._turn:
            message = ClaimMessage(self._order + 1, self._now_ms(), command, question)
            self._order += 1
            try:
                answer = await asyncio.wait_for(self._send(message), _PATIENCE_S)
            except TimeoutError as error:
                raise SchedulerSilentError("the scheduler didn't answer in time") from error
            except SchedulerSilentError:
                raise
            except Exception as error:
                raise SchedulerSilentError(f"the scheduler couldn't be asked: {error}") from error
            self._deadline_ms = answer.deadline_ms
        if self._deadline_ms is not None and (self._ticking is None or self._ticking.done()):
            self._ticking = asyncio.create_task(self._tick())
        return answer

    def _now_ms(self) -> int:
        return (self._now_ns() - self._began_ns) // 1_000_000

    async def _tick(self) -> None:
        """Send the time whenever a deadline has come, and once a second until then."""
        while self._deadline_ms is not None:
            left_s = (self._deadline_ms - self._now_ms()) / 1000
            await asyncio.sleep(min(_TICK_S, max(0.01, left_s)))
            try:
                await self._exchange()
            except SchedulerSilentError as error:
                log.warning("the time did not reach the scheduler: %s", error)
                await asyncio.sleep(_TICK_S)
