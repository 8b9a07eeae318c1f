"""The times of one request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter


class TurnClock:
    """Times one request, from its arrival on; all in seconds."""

    __slots__ = ("_arrived", "ahead_s", "own_s", "tokens", "ttft_s")

    def __init__(self) -> None:
        self._arrived = perf_counter()
        self.own_s = 0.0
        """Time that the proxy itself has spent, over all attempts."""
        self.ahead_s = 0.0
        """Time from the arrival until the request was sent to its engine: the wait for a place,
        engines that failed, and the proxy's own time."""
        self.ttft_s: float | None = None
        """Time from the arrival to the first token; None until it comes."""
        self.tokens = 0
        """Tokens of the answer so far, as events that had some."""

    @property
    def elapsed_s(self) -> float:
        """Time since the arrival."""
        return perf_counter() - self._arrived

    @property
    def engine_ttft_s(self) -> float | None:
        """Time from sending the request to the first token; None until it comes."""
        return None if self.ttft_s is None else self.ttft_s - self.ahead_s

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count the time inside as the proxy's own."""
        began = perf_counter()
        try:
            yield
        finally:
            self.own_s += perf_counter() - began

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Leave the time inside out of :meth:`working`, which is around it."""
        began = perf_counter()
        try:
            yield
        finally:
            self.own_s -= perf_counter() - began

    def sent(self) -> None:
        """Note that the request is ready for an engine; the last attempt holds."""
        self.ahead_s = self.elapsed_s

    def token(self, count: int = 1) -> None:
        """Note tokens; the time of the first one holds."""
        self.tokens += count
        if self.ttft_s is None:
            self.ttft_s = self.elapsed_s
