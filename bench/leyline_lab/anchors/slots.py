"""The states that an engine holds for one session, each in a slot."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from enum import StrEnum
from hashlib import blake2b


class Eviction(StrEnum):
    """The state that goes when there are more than slots."""

    LRU = "least recently used"
    """A match refreshes the state that it continues, and no other, as in SGLang."""
    SPACED = "most closely spaced"
    """First those off the newest turn's path; then those in front of its last edit, except the last
    of them; then the one with the closest neighbours. A path's last state stays."""


class StateSlots:
    """States by the path of keys that leads to them: equal keys have equal state.

    Args:
        bound: number of slots; None for any number.
    """

    def __init__(self, bound: int | None = None, eviction: Eviction = Eviction.LRU) -> None:
        self.peak = 0
        """Largest number of states held at the end of a turn."""
        self._bound = bound
        self._eviction = eviction
        self._held: dict[bytes, None] = {}
        """Digests of paths, the least recently used first."""
        self._known: set[int] = set()
        """Positions that have ever had a state."""

    def on(self, keys: array[int]) -> list[int]:
        """Return the positions of a path that have a state, ascending."""
        return [at for at, path in _paths(keys, self._known).items() if path in self._held]

    def touch(self, keys: array[int], positions: Iterable[int]) -> None:
        """Use states of a path, the last of them most recently."""
        self._use(path for path in _paths(keys, positions).values() if path in self._held)

    def put(self, keys: array[int], positions: Iterable[int], settled: int = 0) -> None:
        """Hold states of a path, then evict down to the bound.

        Args:
            settled: position in front of which the last edit changed nothing.
        """
        added = _paths(keys, positions)
        self._known |= added.keys()
        self._use(added.values())
        if self._bound is not None and len(self._held) > self._bound:
            if self._eviction is Eviction.SPACED:
                self._space(_paths(keys, self._known), self._bound, settled)
            for path in list(self._held)[: max(0, len(self._held) - self._bound)]:
                del self._held[path]
        self.peak = max(self.peak, len(self._held))

    def _use(self, paths: Iterable[bytes]) -> None:
        for path in paths:
            self._held.pop(path, None)
            self._held[path] = None

    def _space(self, newest: Mapping[int, bytes], bound: int, settled: int) -> None:
        here = {at: path for at, path in newest.items() if path in self._held}
        elsewhere = [path for path in self._held if path not in set(here.values())]
        early = [here[at] for at in here if at <= settled][:-1]
        for path in [*elsewhere, *early][: len(self._held) - bound]:
            del self._held[path]
        here = {at: path for at, path in here.items() if path in self._held}
        while len(self._held) > bound:
            places = [0, *here]
            near = zip(places, places[1:], places[2:], strict=False)
            closest = min(near, key=lambda three: three[2] - three[0])[1]
            del self._held[here.pop(closest)]


def _paths(keys: array[int], positions: Iterable[int]) -> dict[int, bytes]:
    """Return a digest of the keys in front of each position, ascending."""
    content, found, at = memoryview(keys).cast("B"), dict[int, bytes](), 0
    state = blake2b(digest_size=16)
    for position in sorted(set(positions)):
        if position > len(keys):
            break
        state.update(content[at * keys.itemsize : position * keys.itemsize])
        found[position], at = state.copy().digest(), position
    return found
