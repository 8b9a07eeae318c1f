"""A circuit breaker that decides when to try a failed replica again. Pure but for its clock.

The handshake shows whether an engine answers at all. The breaker is for one that answers small
requests but fails callers' requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum


class BreakerState(StrEnum):
    """The breaker's treatment of requests."""

    CLOSED = "closed"
    """All requests are sent."""
    OPEN = "open"
    """None is sent until the pause is over."""
    HALF_OPEN = "half_open"
    """One is sent, as a trial."""


class _Event(StrEnum):
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    FAILED_TOO_OFTEN = "failed_too_often"
    BEGAN = "began"
    PAUSE_OVER = "pause_over"


_NEXT: dict[tuple[BreakerState, _Event], BreakerState] = {
    (BreakerState.CLOSED, _Event.FAILED_TOO_OFTEN): BreakerState.OPEN,
    (BreakerState.OPEN, _Event.PAUSE_OVER): BreakerState.HALF_OPEN,
    # A request from before the circuit opened may still succeed.
    (BreakerState.OPEN, _Event.SUCCEEDED): BreakerState.CLOSED,
    (BreakerState.HALF_OPEN, _Event.SUCCEEDED): BreakerState.CLOSED,
    # An answer may take minutes. If it breaks off, the failures before it still count.
    (BreakerState.HALF_OPEN, _Event.BEGAN): BreakerState.CLOSED,
    (BreakerState.HALF_OPEN, _Event.FAILED): BreakerState.OPEN,
    (BreakerState.HALF_OPEN, _Event.FAILED_TOO_OFTEN): BreakerState.OPEN,
}
"""Transitions; others change nothing."""


class Breaker:
    """Counts failures in a row.

    Args:
        threshold: number of failures that open the circuit.
        pause_s: seconds until the first trial; doubles each time that the circuit opens again
            without a success in between, up to ``longest_pause_s``.
    """

    def __init__(
        self,
        *,
        threshold: int = 3,
        pause_s: float = 2.0,
        longest_pause_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._threshold = threshold
        self._first_pause_s = pause_s
        self._longest_pause_s = longest_pause_s
        self._clock = clock
        self._state = BreakerState.CLOSED
        self._failures = 0
        self._has_opened = False
        """True if it has opened since the last success."""
        self._pause_s = pause_s
        self._opened_at = 0.0
        self._on_trial = False

    @property
    def state(self) -> BreakerState:
        """The current state."""
        over = self._clock() - self._opened_at >= self._pause_s
        if self._state is BreakerState.OPEN and over:
            self._go(_Event.PAUSE_OVER)
        return self._state

    @property
    def admits(self) -> bool:
        """True if a request should be sent."""
        state = self.state
        return state is BreakerState.CLOSED or (
            state is BreakerState.HALF_OPEN and not self._on_trial
        )

    def begin(self) -> None:
        """Note that a request is sent; one of the three ends must follow."""
        if self.state is BreakerState.HALF_OPEN:
            self._on_trial = True

    def began(self) -> None:
        """Note that the replica has begun its answer; one of the three ends must still follow."""
        self._on_trial = False
        self._go(_Event.BEGAN)

    def succeeded(self) -> None:
        """Note that the replica has answered."""
        self._failures, self._on_trial, self._has_opened = 0, False, False
        self._pause_s = self._first_pause_s
        self._go(_Event.SUCCEEDED)

    def failed(self) -> None:
        """Note that the replica has failed."""
        self._failures += 1
        self._on_trial = False
        often = self._failures >= self._threshold
        before = self.state  # may end the pause
        self._go(_Event.FAILED_TOO_OFTEN if often else _Event.FAILED)
        if self._state is BreakerState.OPEN and before is not BreakerState.OPEN:
            if self._has_opened:
                self._pause_s = min(self._longest_pause_s, 2 * self._pause_s)
            self._has_opened, self._opened_at = True, self._clock()

    def given_up(self) -> None:
        """Note that the caller has left, which says nothing about the replica."""
        self._on_trial = False

    def _go(self, event: _Event) -> None:
        before = self._state
        self._state = _NEXT.get((before, event), before)
