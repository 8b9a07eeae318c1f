"""Turns that have begun and aren't over, and the sessions that wait for them."""

from __future__ import annotations

from ..model.session import Session
from ..plan.planning import PlanInput
from ..request.identify import Identity, Openings
from ..sessions import SessionStore
from ..sessions.store import SessionChange
from .placing import Placing
from .turn import Turn


class TurnsUnderWay:
    """Keeps the session store informed of what engines may hold meanwhile."""

    def __init__(self, store: SessionStore, placing: Placing) -> None:
        self._store = store
        self._placing = placing
        self._names: set[str] = set()
        self.openings = Openings()
        """First requests of conversations without a name."""

    async def open(self, identity: Identity, given: PlanInput) -> None:
        """Note that an engine may hold something of a turn from here on, whatever becomes of this
        proxy."""
        place = given.request.tenant.name, identity.session_id
        run, session = given.status.retains_as, given.session
        await self._store.open_turn(
            *place, given.turn, identity.key, run=run, replica=given.replica
        )
        self._names.add(given.turn)
        if session is not None and run not in session.places:
            await self._store.update(
                *place, lambda found: self._placing.begun(found or session, run, given.replica)
            )

    def expect(self, name: str) -> None:
        """Count a turn whose engine isn't told of it, and which others owe a forget for."""
        self._names.add(name)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    async def end(
        self, turn: Turn, change: SessionChange, chain: tuple[int, ...] | None
    ) -> Session:
        """Take a turn into its session, or out of it.

        Args:
            change: what becomes of the session.
            chain: the history that the session is found by from now on; None leaves it.
        """
        place = turn.request.tenant.name, turn.identity.session_id
        session = await self._store.update(*place, change, chain, ends=turn.name)
        self._names.discard(turn.name)
        return session

    async def close(self, turn: Turn) -> None:
        """Take back that an engine may hold something of a turn."""
        self._names.discard(turn.name)
        place = turn.request.tenant.name, turn.identity.session_id
        await self._store.close_turn(*place, turn.name)

    def leave(self, turn: Turn) -> None:
        """Let requests go on that wait for the turn's conversation to have a name."""
        self.openings.leave(turn.identity.hold)
