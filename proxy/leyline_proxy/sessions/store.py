"""The interface of session stores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ..model.history import HistoryMatch
from ..model.session import Session
from ..model.text_memory import Left
from .summary import SessionOverview

SessionChange = Callable[[Session | None], Session]
"""A pure function from the current session (None: new) to the next one. A store with several
writers may call it again."""


class SessionCopies(Protocol):
    """Copies of sessions, which only save reading them again."""

    def forget(self, tenant: str, session: str, demands: int | None) -> None:
        """Drop a session's."""
        ...

    def left(self, tenant: str, session: str, demands: int) -> Left:
        """Return none: a proof looks at the original."""
        ...


class SessionStore(Protocol):
    """Sessions by tenant. No method ever crosses from one tenant to another.

    An unreachable store raises nothing and returns without waiting: it knows no histories, and of a
    session only that it may exist.
    """

    @property
    def name(self) -> str:
        """Kind of the store, for people."""
        ...

    @property
    def problem(self) -> str | None:
        """Reason that sessions can't be read and written now; None while they can."""
        ...

    async def get(self, tenant: str, session_id: str) -> Session | None:
        """Return the session, or None if it never existed or has expired.

        A session of which only losses of account are known has neither turns nor history.
        """
        ...

    async def matches(
        self, tenant: str, key: str, chain: Sequence[int], shortest_partial: int
    ) -> Sequence[HistoryMatch]:
        """Return the sessions under ``key`` whose history this one extends or edits.

        ``chain[i]`` is the hash of messages 0..i. A stored history that is wholly a prefix of this
        one counts at any length, and ends the search: the longest, and of equals the latest. A
        partly shared one counts only if the common prefix has at least ``shortest_partial``
        messages.
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
            chain: the session's history from now on; None keeps the known one.
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
        """Note, before an engine gets a turn, that it may hold KV of it from now on.

        The note remains if the proxy is killed before it settles the turn. A later forget in that
        session is then one of everything. A store that ends with its proxy needs no notes.

        Args:
            key: the session's; see :meth:`matches`.
            run, replica: the engine's; see :class:`~leyline_proxy.model.session.Place`.
        """
        ...

    async def close_turn(self, tenant: str, session_id: str, turn: str) -> None:
        """Take the note back: no engine got the turn."""
        ...

    @property
    def copies(self) -> SessionCopies | None:
        """This process's copies of what the store holds elsewhere; None if there are none."""
        ...

    async def delete(self, tenant: str, session_id: str) -> bool:
        """Delete a session, as if it had expired; return True if it existed."""
        ...

    async def sessions(self, tenant: str) -> tuple[SessionOverview, ...]:
        """Return the tenant's live sessions, latest first."""
        ...

    async def count(self) -> int:
        """Return the number of all tenants' live sessions."""
        ...

    async def connect(self) -> None:
        """Check for what the store needs, once and not for long."""
        ...

    async def run(self) -> None:
        """Run the store's background work until cancelled."""
        ...

    async def aclose(self) -> None:
        """Close the store's resources."""
        ...
