"""A radix tree of paths: who holds which beginning of a key sequence. Pure.

SGLang's tree doesn't know who added a node. This one knows for each key of a path which owners'
paths have it, so that a question about a path takes one walk along it, however many paths there
are. It compares whole edges at once.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from leyline_engine.records.keys import shared_length

Owner = TypeVar("Owner", bound=Hashable)
Item = TypeVar("Item")


@dataclass(slots=True, eq=False)
class _Node(Generic[Owner, Item]):
    """An edge's keys, and what lies at its end."""

    keys: array[int]
    parent: _Node[Owner, Item] | None
    owners: dict[Owner, int]
    """Number of paths that reach the edge's end, by owner."""
    children: dict[int, _Node[Owner, Item]] = field(default_factory=dict)
    """By their first keys."""
    ends: list[tuple[Owner, Item]] = field(default_factory=list)
    """Paths that end here."""


@dataclass(frozen=True, slots=True)
class _Step(Generic[Owner, Item]):
    """A part of a walk: an edge, and how far the walk came."""

    node: _Node[Owner, Item]
    shared: int
    """Leading keys of the edge that the walk has."""
    reach: int
    """Keys of the walk up to there."""

    @property
    def whole(self) -> bool:
        """True if the walk passed the edge's end."""
        return self.shared == len(self.node.keys)


class PathTree(Generic[Owner, Item]):
    """Paths by their keys. Each has an owner, not None, and an item that tells it apart."""

    def __init__(self) -> None:
        self._root = _Node[Owner, Item](array("q"), None, {})
        self._ends: dict[int, _Node[Owner, Item]] = {}
        """The node at which a path ends, by the identity of its item."""

    def __bool__(self) -> bool:
        return bool(self._root.children or self._root.ends)

    def add(self, owner: Owner, keys: array[int], item: Item) -> int:
        """Add a path; returns the number of its leading keys that some path had before."""
        node, at = self._root, 0
        while True:
            node.owners[owner] = node.owners.get(owner, 0) + 1
            if at == len(keys):
                node.ends.append((owner, item))
                self._ends[id(item)] = node
                return at
            child = node.children.get(keys[at])
            if child is None:
                leaf = _Node(keys[at:], node, {owner: 1}, ends=[(owner, item)])
                node.children[keys[at]] = self._ends[id(item)] = leaf
                return at
            shared = shared_length(child.keys, keys, 0, at)
            node = child if shared == len(child.keys) else self._split(child, shared)
            at += shared

    def _split(self, node: _Node[Owner, Item], at: int) -> _Node[Owner, Item]:
        """Return a new node between a node and its parent, ``at`` keys after the parent."""
        upper = _Node(node.keys[:at], node.parent, dict(node.owners), {node.keys[at]: node})
        assert node.parent is not None  # noqa: S101 - the root has no keys
        node.parent.children[upper.keys[0]] = upper
        node.keys, node.parent = node.keys[at:], upper
        return upper

    def remove(self, owner: Owner, item: Item) -> None:
        """Remove a path that was added.

        Raises:
            KeyError: there is no such path.
        """
        node = self._ends.pop(id(item))
        del node.ends[next(at for at, end in enumerate(node.ends) if end[1] is item)]
        above: _Node[Owner, Item] | None = node
        while above is not None:
            left = above.owners[owner] - 1
            if left:
                above.owners[owner] = left
            else:
                del above.owners[owner]
            above = above.parent
        self._tidy(node)

    def _tidy(self, node: _Node[Owner, Item]) -> None:
        """Drop a node without paths, and join one that no path ends at to its only child."""
        parent = node.parent
        if parent is None or node.ends:
            return
        if not node.children:
            del parent.children[node.keys[0]]
            self._tidy(parent)
        elif len(node.children) == 1:
            (child,) = node.children.values()
            node.keys.extend(child.keys)
            node.children, node.ends, node.owners = child.children, child.ends, child.owners
            for below in node.children.values():
                below.parent = node
            for _, item in node.ends:
                self._ends[id(item)] = node

    def _walk(self, keys: array[int]) -> Iterator[_Step[Owner, Item]]:
        """Yield the edges along ``keys``, as far as there are any; the last may be passed in part.

        The root is left out.
        """
        node, at = self._root, 0
        while at < len(keys):
            child = node.children.get(keys[at])
            if child is None:
                return
            shared = shared_length(child.keys, keys, 0, at)
            at += shared
            step = _Step(child, shared, at)
            yield step
            if not step.whole:
                return
            node = child

    def beginnings(self, owner: Owner, keys: array[int]) -> tuple[list[Item], bool]:
        """Return an owner's paths that ``keys`` begin with, and whether one begins with ``keys``.

        A path of equal keys is both.
        """
        found = [item for whose, item in self._root.ends if whose == owner]
        last: _Node[Owner, Item] | None = None if keys else self._root
        for step in self._walk(keys):
            if step.whole:
                found += [item for whose, item in step.node.ends if whose == owner]
            if step.reach == len(keys):
                last = step.node
        return found, last is not None and owner in last.owners

    def reach(self, keys: array[int], without: Owner | None = None) -> int:
        """Return the number of leading keys that a path of any owner but ``without`` has."""
        reach = 0
        for step in self._walk(keys):
            if len(step.node.owners) == (without in step.node.owners):
                break
            reach = step.reach
        return reach

    def __contains__(self, item: Item) -> bool:
        """Return True if a path of this very item was added."""
        return id(item) in self._ends

    def _up(self, item: Item) -> Iterator[_Node[Owner, Item]]:
        """Yield the edges of a path that was added, from its end on; the root is left out."""
        node = self._ends[id(item)]
        while node.parent is not None:
            yield node
            node = node.parent

    def reach_of(self, item: Item, without: Owner | None = None) -> int:
        """Return the :meth:`reach` of a path that was added; no key is looked at."""
        edges = list(self._up(item))
        reach = sum(len(node.keys) for node in edges)
        for node in edges:
            if len(node.owners) > (without in node.owners):
                break
            reach -= len(node.keys)
        return reach

    def agreed(self, items: Iterable[Item], sequences: Iterable[array[int]]) -> list[int]:
        """Return, per path that was added, how many leading keys any of ``sequences`` has, too.

        Each sequence is looked at once, however many paths there are.
        """
        reached: dict[_Node[Owner, Item], int] = {}
        for keys in sequences:
            for step in self._walk(keys):
                reached[step.node] = max(step.reach, reached.get(step.node, 0))
        return [next((reached[n] for n in self._up(item) if n in reached), 0) for item in items]

    def repeated(self, items: Iterable[Item]) -> list[int]:
        """Return, per path that was added, how many leading keys an earlier one of them has."""
        passed: set[_Node[Owner, Item]] = set()
        found = []
        for item in items:
            edges = list(self._up(item))
            found.append(sum(len(node.keys) for node in edges if node in passed))
            passed.update(edges)
        return found

    def first_end(self, keys: array[int]) -> Item | None:
        """Return the shortest path that ``keys`` begin with; None if there is none."""
        for step in self._walk(keys):
            if step.whole and step.node.ends:
                return step.node.ends[0][1]
        return None

    def beyond(self, keys: array[int], start: int) -> list[tuple[Owner, Item]]:
        """Return the paths that share more than ``start`` of the leading keys."""
        for step in self._walk(keys):
            if step.reach > start:
                return list(_below(step.node))
        return []


def _below(node: _Node[Owner, Item]) -> Iterator[tuple[Owner, Item]]:
    """Yield the paths that have a node's keys."""
    stack = [node]
    while stack:
        node = stack.pop()
        yield from node.ends
        stack.extend(node.children.values())
