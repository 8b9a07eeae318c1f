"""Condemned KV: what a forget reached while a request holds it. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from leyline_engine.records.path_tree import PathTree
from leyline_engine.records.publications import Publication
from leyline_engine.sglang.tree_keys import TreeKeys


@dataclass(slots=True, eq=False)
class Condemned:
    """A path whose part after ``start`` waits for its holders: no request can match it."""

    path: Publication
    start: int
    """Its first slot that may not be found; a page's edge."""


@dataclass(frozen=True, slots=True)
class Unpublished:
    """The fate of the cached part of a path, in tokens."""

    erased: int = 0
    held: int = 0
    """Tokens locked by running requests."""
    shared: int = 0
    """Tokens from which somebody else's path continues."""


class CondemnedPaths:
    """All that waits for its holders, and how far a path may be matched.

    Args:
        tree_keys: keys of the tree.
    """

    def __init__(self, tree_keys: TreeKeys) -> None:
        self._tree_keys = tree_keys
        self._paths: dict[Condemned, None] = {}
        self._firsts: PathTree[str, Condemned] = PathTree()
        """Paths up to the end of their first condemned page."""

    def __iter__(self) -> Iterator[Condemned]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)

    def append(self, doomed: Condemned) -> None:
        """Add a path; it is condemned from now on."""
        self._paths[doomed] = None
        first = self._first(doomed)
        if first is not None:
            self._firsts.add("", first, doomed)

    def extend(self, doomed: Iterable[Condemned]) -> None:
        """Add several paths."""
        for each in doomed:
            self.append(each)

    def remove(self, doomed: Condemned) -> None:
        """Remove a path that was added."""
        del self._paths[doomed]
        if self._first(doomed) is not None:
            self._firsts.remove("", doomed)

    def defer(self, doomed: Condemned) -> None:
        """Make a path the last in turn."""
        del self._paths[doomed]
        self._paths[doomed] = None

    def clear(self) -> None:
        """Remove all paths."""
        self._paths.clear()
        self._firsts = PathTree()

    def _first(self, doomed: Condemned) -> array[int] | None:
        """Return a path up to its first condemned page; None if it has no whole one."""
        keys, shifted = doomed.path.keys, self._tree_keys.shifted
        end = self._tree_keys.keys_of(doomed.start + self._tree_keys.page)
        return shifted(keys[:end]) if end <= len(keys) else None

    def allowed_length(self, keys: array[int]) -> int:
        """Return the number of leading keys that may be matched: no page of them is condemned."""
        first = self._firsts.first_end(self._tree_keys.shifted(keys))
        return len(keys) if first is None else self._tree_keys.keys_of(first.start)
