"""What the service needs of a place that keeps sessions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ..model.history import HistoryMatch
from ..model.session import Session
from .summary import SessionOverview

SessionChange = Callable[[Session | None], Session]
"""A pure function from the session as it is (None: new) to what it becomes; a store that others
write to as well may call it again."""


class SessionStore(Protocol):
    """Sessions by tenant. No method ever crosses from one tenant to another.

    A store that is out of reach raises nothing and keeps nobody waiting: it knows no histories,
    and of a session only that there may have been one.
    """

    @property
    def name(self) -> str:
        """What kind of store it is, for people."""
        ...

    @property
    def problem(self) -> str | None:
        """Why sessions can't be read and written now; None while they can."""
        ...

    async def get(self, tenant: str, session_id: str) -> Session | None:
        """The session, or None when it never was or has expired.

        One of which only losses of account are known has neither turns nor history.
        """
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
        *,
        ends: str | None = None,
    ) -> Session:
        """Replace a session atomically: no other update comes between its reading and writing.

        Args:
            chain: the session's history from now on; None leaves what was known.
            ends: name of the turn that this settles or gives up; see :meth:`open_turn`.
        """
        ...

    async def open_turn(
        self,
        tenant: str,
        session_id: str,
        turn: str,
        key: str = "",
        *,
        run: str = "",
        replica: str = "",
    ) -> None:
        """Note, before an engine is given a turn, that it may hold something of it from now on.

        A proxy that is killed before it settles the turn leaves the note behind, and a later forget
        in that session is one of everything. A store that ends with its proxy needs no notes.

        Args:
            key: the session's; see :meth:`matches`.
            run, replica: of the engine; see :class:`~leyline_proxy.model.session.Place`.
        """
        ...

    async def close_turn(self, tenant: str, session_id: str, turn: str) -> None:
        """Take the note back: no engine was given the turn."""
        ...

    async def delete(self, tenant: str, session_id: str) -> bool:
        """Let a session go, as if it had expired; whether it was there."""
        ...

    async def sessions(self, tenant: str) -> tuple[SessionOverview, ...]:
        """The tenant's live sessions, latest first."""
        ...

    async def count(self) -> int:
        """All live sessions of all tenants."""
        ...

    async def connect(self) -> None:
        """Look for what the store needs, once and not for long."""
        ...

    async def run(self) -> None:
        """What the store does beside the requests, until it is cancelled."""
        ...

    async def aclose(self) -> None:
        """Give up what the store holds open."""
        ...
