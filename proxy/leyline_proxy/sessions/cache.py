"""A cache of decoded sessions, so that this process doesn't decode unchanged ones again."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..model.session import Session
from ..model.text_memory import Left

B = TypeVar("B")


@dataclass(frozen=True, slots=True)
class Cached(Generic[B]):
    """One version of a session."""

    version: bytes
    session: Session
    beside: B
    """What its store keeps beside it."""
    used: float


class SessionCache(Generic[B]):
    """A least-recently-used cache bounded by bytes and by the time since the last use."""

    def __init__(self, *, max_bytes: int, idle_s: float) -> None:
        self._max_bytes = max_bytes
        self._idle_s = idle_s
        self._bytes = 0
        self._kept: OrderedDict[tuple[str, str], Cached[B]] = OrderedDict()

    def get(self, tenant: str, session_id: str) -> Cached[B] | None:
        """Return a session's entry, or None."""
        return self._kept.get((tenant, session_id))

    def put(self, session: Session, version: bytes, beside: B, now: float) -> None:
        """Keep a session; ``now`` is in seconds, always of the same clock."""
        identity = (session.tenant, session.id)
        self.drop(*identity)
        self._kept[identity] = Cached(version, session, beside, now)
        self._bytes += session.weight
        while self._bytes > self._max_bytes and self._kept:
            self.drop(*next(iter(self._kept)))

    def drop(self, tenant: str, session_id: str) -> None:
        """Drop a session."""
        known = self._kept.pop((tenant, session_id), None)
        if known is not None:
            self._bytes -= known.session.weight

    def forget(self, tenant: str, session: str, demands: int | None) -> None:
        """Drop a session: it is read again."""
        self.drop(tenant, session)

    def left(self, tenant: str, session: str, demands: int) -> Left:
        """Return none: a copy is read again before its use, and a proof looks at the original."""
        return Left()

    def drop_idle(self, now: float) -> None:
        """Drop sessions unused for long: another process may have a later version."""
        while self._kept:
            identity, known = next(iter(self._kept.items()))
            if now - known.used < self._idle_s:
                return
            self.drop(*identity)
