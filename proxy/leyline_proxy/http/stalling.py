"""The time limit for clients that read too slowly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class StallTimer:
    """Cuts a connection off if it can't be written to for too long.

    Args:
        cut_off: aborts the connection: to close it would wait for the client to read what is
            buffered.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, seconds: float, cut_off: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._seconds = seconds
        self._cut_off = cut_off
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start, or start again: writing pauses."""
        self.stop()
        self._handle = self._loop.call_later(self._seconds, self._cut_off)

    def stop(self) -> None:
        """Stop: the client has caught up, or has gone."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
