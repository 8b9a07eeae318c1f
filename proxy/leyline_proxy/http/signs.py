"""Signs of life to the client of a stream that is silent."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from time import monotonic

Sign = Callable[[], Awaitable[None]]


class Signs:
    """One sign for each ``pause_s`` in which nothing was sent. Whoever waits for the stream's next
    part gives them, so that they need no task of their own.

    Args:
        sign: sends one.
    """

    def __init__(self, sign: Sign, pause_s: float) -> None:
        self._sign = sign
        self._pause_s = pause_s
        self._on = True
        self.put_off()

    def put_off(self) -> None:
        """Note that something was sent."""
        self._due = monotonic() + self._pause_s

    def stop(self) -> None:
        """Give none any more."""
        self._on = False

    @property
    def wait_s(self) -> float | None:
        """Time until one is due; None if none will be."""
        return max(0.0, self._due - monotonic()) if self._on else None

    async def give(self) -> None:
        """Give one, if it is due."""
        if self._on and monotonic() >= self._due:
            self.put_off()
            await self._sign()
