"""Heavy work, a piece in each turn of the event loop."""

from __future__ import annotations

import asyncio
from collections import deque


class Pace:
    """Lets pieces of work begin one after the other, in the order in which they came.

    Where hundreds of requests are ready at once, and each takes milliseconds to plan, a turn of the
    loop would last for seconds, and whatever else is ready would wait as long: new connections,
    questions after health, chunks of others' streams. So it waits for one.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._taken = False

    def enter(self) -> asyncio.Future[None] | None:
        """None where the work may begin at once, or what to wait for; cancelled, it is passed
        over."""
        loop = asyncio.get_running_loop()
        if not self._taken:
            self._taken = True
            loop.call_soon(self._next, loop)
            return None
        ticket = loop.create_future()
        self._waiting.append(ticket)
        return ticket

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        """The loop has turned."""
        while self._waiting:
            ticket = self._waiting.popleft()
            if not ticket.done():
                ticket.set_result(None)
                loop.call_soon(self._next, loop)
                return
        self._taken = False
