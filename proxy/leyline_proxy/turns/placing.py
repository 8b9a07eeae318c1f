"""Engine runs that may hold a session's KV, updated with its turns."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from ..model.forgotten import without_written
from ..model.places import after_turn, all_owed, unknown_run
from ..model.session import Place, Session
from ..upstream.pool import ReplicaPool
from .turn import Turn


class Placing:
    """Keeps the places of sessions."""

    def __init__(self, pool: ReplicaPool) -> None:
        self._pool = pool

    def begun(self, session: Session, run: str, replica: str) -> Session:
        """Return a session with a run that it is about to move to.

        The run is recorded in advance: a forget that another request of the session demands
        meanwhile is owed there, too."""
        if not run or run in session.places:
            return session
        return self._given(session, session.places, run, replica, demanded=False)

    def after(self, session: Session, turn: Turn, run: str, *, obeyed: bool) -> Session:
        """Return the session with the run that received a turn.

        Args:
            obeyed: True if the run has confirmed the turn's demands.
        """
        demanded = bool(turn.planned.plan.forgets)
        places = self.known(session.places, turn) if demanded else session.places
        # Demands made while this turn ran came too early for the KV that it left in the cache.
        owes = (demanded and not obeyed) or session.demands > turn.demands
        after = self._given(session, places, run, turn.place, demanded=demanded, owes=owes)
        return replace(after, demands=session.demands + demanded)

    def known(self, places: Mapping[str, Place], turn: Turn) -> Mapping[str, Place]:
        """Return all places that a turn's demand concerns."""
        if turn.replica.router is not None:
            # A router may have tried several engines, of which only the last one is known.
            behind = {each.status.retains_as for each in self._pool.behind(turn.replica)}
            places = {**{run: at for run, at in self.anywhere().items() if run in behind}, **places}
        if not turn.unnamed and not turn.unvouched:
            return places
        # Any engine may have read KV that has no name here.
        return {**self.anywhere(), **places}

    def concerned(self, session: Session | None, turn: Turn) -> dict[str, str]:
        """Return the replicas, by run, of places that a turn's demand concerns, and its own."""
        places = self.known(session.places if session is not None else {}, turn)
        own = {turn.status.retains_as: turn.place} if turn.status.retains_as else {}
        return {run: place.replica for run, place in places.items()} | own

    def forgotten(self, session: Session) -> Session:
        """Return the session with a forget of everything, owed by all engines that may have it."""
        places = session.places
        if session.unnamed or session.unvouched:
            places = {**self.anywhere(), **places}  # any engine may have KV without a name here
        return replace(
            without_written(session.without_tokens()),
            places=all_owed(places),
            demands=session.demands + 1,
        )

    def anywhere(self) -> Mapping[str, Place]:
        """Return all runs, and engines with an unknown run because they are out of reach."""
        found: dict[str, Place] = {}
        for replica in self._pool:
            status = replica.status
            if run := status.retains_as or ("" if status.up else unknown_run(replica.name)):
                found[run] = Place(replica.name)
        return found

    def all_take_forgets(self, model: str, allowed: Collection[str] | None) -> bool:
        """Return True if no engine that may have served requests for a model is a plain server.

        Args:
            allowed: names of the engines that the tenant may use; None for all.
        """
        return not any(
            replica.status.up and not replica.status.retains_as and replica.status.serves(model)
            for replica in self._pool
            if allowed is None or replica.name in allowed
        )

    def _given(
        self,
        session: Session,
        places: Mapping[str, Place],
        run: str,
        replica: str,
        *,
        demanded: bool,
        owes: bool = False,
    ) -> Session:
        alive = {each.status.retains_as for each in self._pool}
        after = after_turn(places, run, replica, demanded=demanded, owes=owes, alive=alive)
        return replace(session, places=after)
