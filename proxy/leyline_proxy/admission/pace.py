"""Heavy work, a piece in each turn of the event loop."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque


class Pace:
    """Lets pieces of work begin one after the other; tenants take turns.

    Where hundreds of requests are ready at once, and each takes milliseconds to plan, a turn of the
    loop would last for seconds, and whatever else is ready would wait as long: new connections,
    questions after health, chunks of others' streams. So it waits for one.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """By tenant; whose turn is next stands first."""
        self._taken = False

    def enter(self, tenant: str) -> asyncio.Future[None] | None:
        """None where the work may begin at once, or what to wait for; cancelled, it is passed
        over."""
        loop = asyncio.get_running_loop()
        if not self._taken:
            self._taken = True
            loop.call_soon(self._next, loop)
            return None
        ticket = loop.create_future()
        self._waiting.setdefault(tenant, deque()).append(ticket)
        return ticket

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        """The loop has turned."""
        while self._waiting:
            tenant, line = self._waiting.popitem(last=False)
            ticket = line.popleft()
            if line:
                self._waiting[tenant] = line
            if not ticket.done():
                ticket.set_result(None)
                loop.call_soon(self._next, loop)
                return
        self._taken = False
