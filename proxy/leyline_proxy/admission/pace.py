"""Heavy work, one piece per turn of the event loop."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque


class Pace:
    """Starts pieces of work one after the other; tenants take turns.

    If hundreds of requests are ready at once, and each takes milliseconds to plan, a turn of the
    loop would last for seconds, and everything else would wait as long: new connections, health
    checks, chunks of other streams. With this, they wait for one piece.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """Waiting work by tenant, the next tenant first."""
        self._taken = False

    def enter(self, tenant: str) -> asyncio.Future[None] | None:
        """Return None to begin at once, or a future to wait for; cancelled ones are skipped."""
        loop = asyncio.get_running_loop()
        if not self._taken:
            self._taken = True
            loop.call_soon(self._next, loop)
            return None
        ticket = loop.create_future()
        self._waiting.setdefault(tenant, deque()).append(ticket)
        return ticket

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the next piece after a turn of the loop."""
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
