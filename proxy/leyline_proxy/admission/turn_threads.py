"""The threads in which turns are edited and planned, shared fairly among tenants."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ..tenants import Tenant
from .fair_queue import Arrival, Share
from .places import PlaceBook

T = TypeVar("T")

_MOST = 32
_EXTRA = 4
_UNBOUNDED = 1 << 30
"""Requests are counted before they come here."""


class TurnThreads:
    """Runs work of turns: policies and their patterns, plans, specs that are read.

    A tenant takes at most half of the threads, unless it is the only one there can be; free ones go
    to the tenants in turn, by weight. Work that can't be stopped keeps its thread, and its place,
    after its request has gone.

    Args:
        places: number of threads.
    """

    def __init__(self, places: int | None = None) -> None:
        places = places or min(_MOST, (os.cpu_count() or 1) + _EXTRA)
        self._share = max(1, places // 2)
        self._book: PlaceBook[asyncio.Future[None]] = PlaceBook(places, _grant)
        self._threads = ThreadPoolExecutor(places, "leyline-turn")

    async def run(self, tenant: Tenant, work: Callable[[], T]) -> T:
        """Return or raise the result of ``work``, from one of the threads."""
        loop = asyncio.get_running_loop()
        ticket: asyncio.Future[None] = loop.create_future()
        is_alone = tenant.limits.max_concurrent is None
        share = Share(tenant.limits.weight, None if is_alone else self._share, _UNBOUNDED)

        def leave() -> None:
            self._book.leave(tenant.name, ticket)

        try:
            if self._book.enter(tenant.name, share, ticket) is Arrival.WAITS:
                await ticket
            running = self._threads.submit(contextvars.copy_context().run, work)
        except BaseException:
            leave()
            raise

        def ended(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(leave)

        running.add_done_callback(ended)
        return await asyncio.wrap_future(running)


def _grant(ticket: asyncio.Future[None]) -> None:
    if not ticket.done():  # else its request leaves in a moment
        ticket.set_result(None)
