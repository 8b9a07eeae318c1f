"""Where KV of a session may lie: the runs of engines that were given its turns. Pure.

A session moves when its engine fails or another is added, and what it leaves behind stays in the
cache there. A forget has to reach that, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .session import Place

MAX_PLACES = 64
"""Of a session; far more than there are engines."""

Places = Mapping[str, Place]


def after_turn(places: Places, run: str, replica: str, *, demanded: bool) -> Places:
    """Places of a session whose turn was given to a run of a replica.

    Args:
        run: empty for an engine that retains nothing, which is no place.
        demanded: whether the turn demanded a forget, which then is owed everywhere else.
    """
    found = {
        other: replace(place, owed=True) if demanded else place
        for other, place in places.items()
        # Another run of this replica has ended, and its KV with it.
        if not run or place.replica != replica
    }
    if run:
        # A session that comes back before the debt is paid doesn't pay it.
        found[run] = Place(replica, owed=run in places and places[run].owed)
    return dict(list(found.items())[-MAX_PLACES:])


def erased(places: Places, run: str) -> Places:
    """Places without one that holds nothing of the session any more."""
    return {other: place for other, place in places.items() if other != run}


def owed(places: Places) -> dict[str, str]:
    """Replicas by run, of runs that still have to forget."""
    return {run: place.replica for run, place in places.items() if place.owed}
