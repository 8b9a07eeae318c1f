"""What the service needs of a place that keeps sessions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ..core.identity import HistoryMatch
from ..core.session import Session

SessionChange = Callable[[Session | None], Session]
"""A pure function from the session as it is (None: new) to what it becomes."""


class SessionStore(Protocol):
    """Sessions by tenant. No method ever crosses from one tenant to another."""

    async def get(self, tenant: str, session_id: str) -> Session | None:
        """The session, or None when it never was or has expired."""
        ...

    async def matches(
        self, tenant: str, key: str, chain: Sequence[int], shortest_partial: int
    ) -> Sequence[HistoryMatch]:
        """Sessions under ``key`` whose history this one extends or edits.

        ``chain[i]`` is the hash of messages 0..i. A stored history that is wholly a prefix of
        this one counts from any length, and ends the search: the longest, and of equals the
        latest. One that is shared in part only counts when the common prefix has at least
        ``shortest_partial`` messages.
        """
        ...

    async def update(
        self,
        tenant: str,
        session_id: str,
        change: SessionChange,
        chain: Sequence[int] | None = None,
    ) -> Session:
        """Replace a session atomically: no other update comes between its reading and writing.

        ``chain`` is the session's history from now on; None leaves what was known.
        """
        ...

    async def sessions(self, tenant: str) -> tuple[Session, ...]:
        """The tenant's live sessions, latest first."""
        ...

    async def count(self) -> int:
        """All live sessions of all tenants."""
        ...
