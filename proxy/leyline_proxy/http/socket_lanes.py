"""The requests of one WebSocket connection: in order within a lane, lanes side by side."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass

from ..apis.responses.socket import Create
from ..errors import LimitError

MAX_LANES = 8
"""Lanes of one connection with a request under way."""
MAX_WAITING = 16
"""Requests of one connection that wait for the one in front of them."""


@dataclass(frozen=True, slots=True)
class Received:
    """A request, and its place among those of its tenant that are being read. It keeps the place
    until it runs, because its body is in memory."""

    create: Create
    reading: ExitStack


class Lanes:
    """Runs requests.

    Args:
        run: answers one; it raises nothing.
        max_bytes: of all waiting requests together.
    """

    def __init__(self, run: Callable[[Create], Awaitable[None]], *, max_bytes: int) -> None:
        self._run = run
        self._max_bytes = max_bytes
        self._waiting: dict[str | None, deque[Received]] = {}
        self._tasks: dict[str | None, asyncio.Task[None]] = {}
        self.idle_since = asyncio.get_running_loop().time()
        """Time of the event loop since which nothing has run."""

    @property
    def busy(self) -> bool:
        """True while a request is under way."""
        return bool(self._tasks)

    def add(self, received: Received) -> None:
        """Run a request after those of its lane.

        Raises:
            LimitError: too many are under way, or wait.
        """
        create = received.create
        if create.lane not in self._tasks:
            if len(self._tasks) >= MAX_LANES:
                raise _limit(
                    f"{MAX_LANES} lanes of this connection have a request under way; wait for one, "
                    "or open another connection.",
                    param="stream_id",
                )
            self._waiting[create.lane] = deque((received,))
            self._tasks[create.lane] = asyncio.create_task(self._serve(create.lane))
            return
        waiting = [each for lane in self._waiting.values() for each in lane]
        size = sum(len(each.create.body) for each in waiting) + len(create.body)
        if len(waiting) >= MAX_WAITING or size > self._max_bytes:
            raise _limit(
                f"Too many requests of this connection wait ({MAX_WAITING} requests, "
                f"{self._max_bytes} bytes); read the answers first."
            )
        self._waiting[create.lane].append(received)

    def give_up_waiting(self) -> list[Create]:
        """Return the requests that haven't begun, which then won't."""
        dropped = [each for lane in self._waiting.values() for each in lane]
        for lane in self._waiting.values():
            lane.clear()
        for each in dropped:
            each.reading.close()
        return [each.create for each in dropped]

    async def settled(self) -> None:
        """Wait until nothing runs."""
        while self._tasks:
            await asyncio.wait(self._tasks.values())

    async def aclose(self) -> None:
        """Stop everything."""
        tasks = [*self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, lane: str | None) -> None:
        waiting = self._waiting[lane]
        try:
            while waiting:
                received = waiting.popleft()
                received.reading.close()
                await self._run(received.create)
                del received  # its body
        finally:
            del self._waiting[lane], self._tasks[lane]
            self.idle_since = asyncio.get_running_loop().time()


def _limit(message: str, param: str | None = None) -> LimitError:
    return LimitError(message, param=param, code="too_many_in_flight")
