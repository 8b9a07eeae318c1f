"""The tree of paths, against lists that are searched."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_engine.records.path_tree import PathTree

KEYS = st.lists(st.integers(0, 2), max_size=7).map(lambda keys: array("q", keys))
CHANGES = st.lists(st.tuples(st.sampled_from(["a", "b"]), KEYS, st.booleans()), max_size=24)


class Held:
    """A tree, and the same paths in a list."""

    def __init__(self, changes: list[tuple[str, array[int], bool]]) -> None:
        self.tree: PathTree[str, int] = PathTree()
        self.paths: list[tuple[str, array[int], int]] = []
        for number, (owner, keys, goes) in enumerate(changes):
            item = 1000 + number  # too large for Python to keep only one
            self.tree.add(owner, keys, item)
            self.paths.append((owner, keys, item))
            if goes:
                self.remove(number % len(self.paths))

    def remove(self, index: int) -> None:
        """Remove a path from both."""
        owner, _, item = self.paths.pop(index)
        self.tree.remove(owner, item)


def begins(keys: array[int], path: array[int]) -> bool:
    """True if a path is a beginning of ``keys``."""
    return keys[: len(path)] == path


def common(one: array[int], other: array[int]) -> int:
    """The number of leading keys of both."""
    same = [a == b for a, b in zip(one, other, strict=False)]
    return [*same, False].index(False)


@given(CHANGES, KEYS, st.integers(0, 7))
def test_a_walk_finds_what_a_search_finds(
    changes: list[tuple[str, array[int], bool]], keys: array[int], start: int
) -> None:
    """Beginnings, reach, first ends and paths beyond a place, after any additions and removals."""
    held = Held(changes)
    for owner in ("a", "b"):
        own = [(path, item) for whose, path, item in held.paths if whose == owner]
        found, covered = held.tree.beginnings(owner, keys)
        assert sorted(found) == sorted(item for path, item in own if begins(keys, path))
        assert covered == any(begins(path, keys) for path, _ in own)
        others = [path for whose, path, _ in held.paths if whose != owner]
        assert held.tree.reach(keys, owner) == max(
            (common(path, keys) for path in others), default=0
        )
    everyone = [common(path, keys) for _, path, _ in held.paths]
    assert held.tree.reach(keys) == max(everyone, default=0)
    beyond = [(whose, item) for whose, path, item in held.paths if common(path, keys) > start]
    assert sorted(held.tree.beyond(keys, start)) == sorted(beyond)
    first = held.tree.first_end(keys)
    ends = [len(path) for _, path, _ in held.paths if path and begins(keys, path)]
    assert (first is not None) == bool(ends)
    if first is not None:
        assert len(next(path for _, path, item in held.paths if item == first)) == min(ends)


@given(CHANGES, st.lists(KEYS, max_size=3))
def test_paths_in_the_tree_are_compared_without_their_keys(
    changes: list[tuple[str, array[int], bool]], sequences: list[array[int]]
) -> None:
    """Common parts of added paths with other owners, given sequences and one another."""
    held = Held(changes)
    items = [item for _, _, item in held.paths]
    for owner, keys, item in held.paths:
        assert item in held.tree
        assert held.tree.reach_of(item) == held.tree.reach(keys)
        assert held.tree.reach_of(item, owner) == held.tree.reach(keys, owner)
    paths = [path for _, path, _ in held.paths]
    assert held.tree.agreed(items, sequences) == [
        max((common(path, keys) for keys in sequences), default=0) for path in paths
    ]
    # The tree counts whole edges: as long as the paths are in it, each parts at an edge's end.
    assert held.tree.repeated(items) == [
        max((common(path, before) for before in paths[:number]), default=0)
        for number, path in enumerate(paths)
    ]
    assert 999 not in held.tree


@given(CHANGES)
def test_nothing_stays_of_paths_that_are_removed(
    changes: list[tuple[str, array[int], bool]],
) -> None:
    """A tree is empty once all its paths are gone, and knows no path that isn't there."""
    held = Held(changes)
    while held.paths:
        owner, _, item = held.paths[0]
        held.remove(0)
        with pytest.raises(KeyError):
            held.tree.remove(owner, item)
    assert not held.tree
    assert not held.tree._root.owners
    assert not held.tree._ends
