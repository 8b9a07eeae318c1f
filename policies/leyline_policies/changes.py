"""The places at which a list holds other objects than the list before it, found at C's speed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress, count
from operator import is_not
from typing import Any

Places = Sequence[int]


def changed_places(known: Sequence[Any], now: Sequence[Any]) -> Places:
    """Return the places, in order, at which both lists have something, but not the same object."""
    return [*compress(count(), map(is_not, known, now))]


class Changes:
    """`changed_places` of lists that aren't changed any more: each pair is compared once a turn.

    Most policies of a pipeline edit nothing, and the next one gets the very same list; a result for
    it holds for all of them. A tuple never changes; a list has to be declared unchanged.
    """

    def __init__(self) -> None:
        self._settled: dict[int, Sequence[Any]] = {}
        # By identity: the lists are kept here, so that no other gets theirs.
        self._found: dict[tuple[int, int], tuple[Sequence[Any], Sequence[Any], Places]] = {}

    def settle(self, items: Sequence[Any]) -> None:
        """Declare that this list doesn't change any more."""
        self._settled[id(items)] = items

    def is_settled(self, items: Sequence[Any]) -> bool:
        """Return True if the list keeps its items."""
        return type(items) is tuple or id(items) in self._settled

    def between(self, known: Sequence[Any], now: Sequence[Any]) -> Places:
        """Return `changed_places`; ``known`` must be settled or the caller's own."""
        if known is now:
            return ()
        if not self.is_settled(now):
            return changed_places(known, now)
        found = self._found.get((id(known), id(now)))
        if found is None:
            found = known, now, changed_places(known, now)
            self._found[id(known), id(now)] = found
        return found[2]

    def note(self, known: Sequence[Any], now: Sequence[Any], places: Places) -> None:
        """Note that only these places differ: the maker of ``now`` from ``known`` knows."""
        if self.is_settled(now):
            self._found[id(known), id(now)] = known, now, places

    def next_turn(self) -> None:
        """Drop the lists."""
        self._settled.clear()
        self._found.clear()
