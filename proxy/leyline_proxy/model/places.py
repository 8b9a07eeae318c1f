"""Where KV of a session may lie: the runs of engines that were given its turns. Pure.

A session moves when its engine fails or another is added, and what it leaves behind stays in the
cache there. A forget has to reach that, too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from .session import Place

MAX_PLACES = 64
"""Of a session; far more than there are engines."""

_UNKNOWN = "?@"

Places = Mapping[str, Place]


def unknown_run(replica: str) -> str:
    """Stands for whatever run of a replica goes on that is out of reach just now."""
    return _UNKNOWN + replica


def is_unknown_run(run: str) -> bool:
    """Whether it isn't known which run is meant, so that none can be told to have ended."""
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
    """Places of a session whose turn was given to a run of a replica.

    Args:
        run: empty for an engine that retains nothing, which is no place.
        demanded: whether the turn demanded a forget, which then is owed everywhere else.
        owes: whether this run itself still has to forget: it confirmed nothing, or what it
            confirmed came too early.
        alive: runs that are known to go on, under whatever name.
    """
    found: dict[str, Place] = {}
    own = Place(replica, owed=owes)
    for other, place in places.items():
        ended = place.replica == replica and other not in alive
        if run and (other == run or ended):
            # Another run of this replica has ended, and its KV with it. Its debt passes on, as does
            # that of a session that comes back: which run it was may have been a mistake.
            own = replace(own, owed=own.owed or place.owed, changes=own.changes + place.changes)
        elif demanded:
            found[other] = replace(place, owed=True, changes=place.changes + 1)
        else:
            found[other] = place
    if run:
        found[run] = replace(own, changes=own.changes + 1)
    return _bounded(found)


def _bounded(places: Places) -> Places:
    """The newest; first those go that owe nothing."""
    excess = len(places) - MAX_PLACES
    if excess <= 0:
        return places
    idle = [run for run, place in list(places.items())[:-1] if not place.owed][:excess]
    kept = {run: place for run, place in places.items() if run not in idle}
    return dict(list(kept.items())[-MAX_PLACES:])


def all_owed(places: Places) -> Places:
    """Places of a session with a demand that reached no engine at all."""
    return {
        run: replace(place, owed=True, changes=place.changes + 1) for run, place in places.items()
    }


def erased(places: Places, run: str, seen: Place) -> Places:
    """Places without one that holds nothing of the session any more.

    Args:
        seen: the place when its erasure began. If it has changed since, it stays as it is.
    """
    return {other: place for other, place in places.items() if other != run or place != seen}


def owed(places: Places) -> dict[str, str]:
    """Replicas by run, of runs that still have to forget."""
    return {run: place.replica for run, place in places.items() if place.owed}
