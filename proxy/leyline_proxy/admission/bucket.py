"""A token bucket. Pure: the time comes from outside."""

from __future__ import annotations


class TokenBucket:
    """Lets so many pass a minute; what isn't used is saved up to a minute's worth.

    Args:
        per_minute: more than 0; a bucket of less than one still lets one pass when it is full.
        now: seconds of any clock that never goes back.
    """

    def __init__(self, per_minute: float, now: float) -> None:
        self._per_second = per_minute / 60
        self._size = max(1.0, per_minute)
        self._tokens = self._size
        self._filled = now

    def take(self, now: float) -> float:
        """Pass, if there is a token: 0.0; else the seconds until there will be one."""
        filled = self._tokens + max(0.0, now - self._filled) * self._per_second
        self._tokens = min(self._size, filled)
        self._filled = now
        if self._tokens >= 1:
            self._tokens -= 1
            return 0.0
        return (1 - self._tokens) / self._per_second
