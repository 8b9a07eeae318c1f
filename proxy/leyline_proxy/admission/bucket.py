"""A token bucket. Pure: the caller passes the time."""

from __future__ import annotations


class TokenBucket:
    """Admits a number of requests per minute; unused ones are saved up to a minute's worth.

    Args:
        per_minute: more than 0; a full bucket of less than one still admits one.
        now: seconds of any clock that never goes back.
    """

    def __init__(self, per_minute: float, now: float) -> None:
        self._per_second = per_minute / 60
        self._size = max(1.0, per_minute)
        self._tokens = self._size
        self._filled = now

    def take(self, now: float) -> float:
        """Take a token and return 0.0; if there is none, return the seconds until the next one."""
        filled = self._tokens + max(0.0, now - self._filled) * self._per_second
        self._tokens = min(self._size, filled)
        self._filled = now
        if self._tokens >= 1:
            self._tokens -= 1
            return 0.0
        return (1 - self._tokens) / self._per_second
