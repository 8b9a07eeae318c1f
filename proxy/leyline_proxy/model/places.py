"""Runs of engines that may hold KV of a session. Pure.

A session moves when its engine fails or another is added, and its KV stays in the old engine's
cache. A forget must reach that KV, too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from .session import Place

MAX_PLACES = 64
"""Largest number per session; far more than there are engines."""

_UNKNOWN = "?@"

Places = Mapping[str, Place]


def unknown_run(replica: str) -> str:
    """Return a placeholder for the current run of an unreachable replica."""
    return _UNKNOWN + replica


def is_unknown_run(run: str) -> bool:
    """Return True for the placeholder of an unknown run, which can't be reported to have ended."""
    return run.startswith(_UNKNOWN)


def after_turn(
    places: Places,
    run: str,
    replica: str,
    *,
    demanded: bool,
    owes: bool = False,
    alive: Collection[str] = (),
) -> Places:
    """Return the places of a session after a run of a replica received its turn.

    Args:
        run: empty for an engine that retains nothing, which isn't a place.
        demanded: True if the turn demanded a forget, which then is owed everywhere else.
        owes: True if this run itself still has to forget: it confirmed nothing, or too early.
        alive: runs known to continue, under whatever name.
    """
    found: dict[str, Place] = {}
    own = Place(replica, owed=owes)
    for other, place in places.items():
        ended = place.replica == replica and other not in alive
        if run and (other == run or ended):
            # Another run of this replica has ended, and its KV is gone. The debt passes to this
            # run, as for a returning session: the earlier name of the run may have been a mistake.
            own = replace(own, owed=own.owed or place.owed, changes=own.changes + place.changes)
        elif demanded:
            found[other] = replace(place, owed=True, changes=place.changes + 1)
        else:
            found[other] = place
    if run:
        found[run] = replace(own, changes=own.changes + 1)
    return _bounded(found)


def _bounded(places: Places) -> Places:
    """Return the newest places; those that owe nothing are dropped first."""
    excess = len(places) - MAX_PLACES
    if excess <= 0:
        return places
    idle = [run for run, place in list(places.items())[:-1] if not place.owed][:excess]
    kept = {run: place for run, place in places.items() if run not in idle}
    return dict(list(kept.items())[-MAX_PLACES:])


def all_owed(places: Places) -> Places:
    """Return the places of a session after a demand that reached no engine."""
    return {
        run: replace(place, owed=True, changes=place.changes + 1) for run, place in places.items()
    }


def erased(places: Places, run: str, seen: Place) -> Places:
    """Return the places without one that no longer holds anything of the session.

    Args:
        seen: the place when its erasure began. If it has changed since, it remains.
    """
    return {other: place for other, place in places.items() if other != run or place != seen}


def owed(places: Places) -> dict[str, str]:
    """Return the replicas, by run, of runs that still have to forget."""
    return {run: place.replica for run, place in places.items() if place.owed}
