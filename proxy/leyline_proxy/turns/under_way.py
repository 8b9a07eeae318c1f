"""Turns that have begun but not ended, and the sessions that wait for them."""

from __future__ import annotations

from ..model.session import Session
from ..plan.plan_input import PlanInput
from ..request.identify import Identity, Openings
from ..sessions import SessionStore
from ..sessions.store import SessionChange
from .placing import Placing
from .ports import TurnWatch
from .turn import Turn


class TurnsUnderWay:
    """Informs the session store of KV that engines may hold meanwhile."""

    def __init__(self, store: SessionStore, placing: Placing, watch: TurnWatch) -> None:
        self._store = store
        self.watch = watch
        self.placing = placing
        self._names: set[str] = set()
        self.openings = Openings()
        """First requests of conversations without a name."""

    async def open(self, identity: Identity, given: PlanInput) -> None:
        """Record that an engine may hold KV of a turn from here on, even if this proxy fails."""
        place = given.request.tenant.name, identity.session_id
        run, session = given.status.retains_as, given.session
        await self._store.open_turn(
            *place, given.turn, identity.key, run=run, replica=given.replica
        )
        self._names.add(given.turn)
        if session is not None and run not in session.places:
            await self._store.update(
                *place, lambda found: self.placing.begun(found or session, run, given.replica)
            )

    def expect(self, name: str) -> None:
        """Count a turn that its engine doesn't know but for which others owe a forget."""
        self._names.add(name)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    async def end(
        self, turn: Turn, change: SessionChange, chain: tuple[int, ...] | None
    ) -> Session:
        """Add a turn to its session, or remove it.

        Args:
            change: returns the session's new state.
            chain: the history by which the session is found from now on; None leaves it.
        """
        place = turn.request.tenant.name, turn.identity.session_id
        session = await self._store.update(*place, change, chain, ends=turn.name)
        self._names.discard(turn.name)
        return session

    async def close(self, turn: Turn) -> None:
        """Withdraw the record that an engine may hold KV of a turn."""
        self._names.discard(turn.name)
        place = turn.request.tenant.name, turn.identity.session_id
        await self._store.close_turn(*place, turn.name)

    def leave(self, turn: Turn) -> None:
        """Release requests that wait for the turn's conversation to have a name."""
        self.openings.leave(turn.identity.hold)
