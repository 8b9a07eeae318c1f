"""Sessions that this proxy has decoded, so that one that hasn't changed is not decoded again."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from ...model.session import Session


@dataclass(frozen=True, slots=True)
class Cached:
    """A session as of a version."""

    version: bytes
    session: Session
    chain: tuple[int, ...]
    used: float


class SessionCache:
    """Bounded by bytes and by age of last use, least recently used out first."""

    def __init__(self, *, max_bytes: int, idle_s: float) -> None:
        self._max_bytes = max_bytes
        self._idle_s = idle_s
        self._bytes = 0
        self._kept: OrderedDict[tuple[str, str], Cached] = OrderedDict()

    def get(self, tenant: str, session_id: str) -> Cached | None:
        """What is known of a session."""
        return self._kept.get((tenant, session_id))

    def put(self, session: Session, version: bytes, chain: tuple[int, ...], now: float) -> None:
        """Keep a session; ``now`` in seconds of any one clock."""
        identity = (session.tenant, session.id)
        self.drop(*identity)
        self._kept[identity] = Cached(version, session, chain, now)
        self._bytes += session.weight
        while self._bytes > self._max_bytes and self._kept:
            self.drop(*next(iter(self._kept)))

    def drop(self, tenant: str, session_id: str) -> None:
        """Keep a session no longer."""
        known = self._kept.pop((tenant, session_id), None)
        if known is not None:
            self._bytes -= known.session.weight

    def drop_idle(self, now: float) -> None:
        """Drop what nobody has used for long: it may be held elsewhere in a later version."""
        while self._kept:
            identity, known = next(iter(self._kept.items()))
            if now - known.used < self._idle_s:
                return
            self.drop(*identity)
