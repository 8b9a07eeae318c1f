"""The radix tree as claims see it: paths that stay, and paths that go later than others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from leyline_engine.claims.place import ClaimPlace
from leyline_engine.claims.protection import ClaimKey
from leyline_replay.cache.integrity import IntegrityError
from leyline_replay.cache.manager import CacheManager
from leyline_replay.cache.radix import Node


class TreeShelf:
    """The :class:`leyline_engine.claims.keeper.Shelf` over a radix tree.

    A claim holds the node at which its path ends: whatever splits later, that node stays the end.
    """

    def __init__(self, cache: CacheManager) -> None:
        self._cache = cache
        self._locks: dict[ClaimKey, Node] = {}
        self._pins: dict[ClaimKey, Node] = {}
        """The node of the state that each locked path ends with."""
        self._ranks: dict[ClaimKey, Node] = {}
        self.locks_taken = 0
        """Number of locks taken since the beginning. While unchanged, nothing has less room."""

    def slots(self, place: ClaimPlace) -> Sequence[int]:
        """Return the slots of a path's cached part; nothing is split or touched."""
        found: list[int] = self._cache.tree.peek(place.keys).tolist()
        return found

    def lock(self, claim: ClaimKey, place: ClaimPlace, length: int) -> None:
        """Lock a path, split where it ends."""
        node = self._cache.tree.cut(place.keys[:length])
        self._cache.lock(node)
        self._locks[claim] = node
        if (anchor := self._cache.anchors.pin(node)) is not None:
            self._pins[claim] = anchor
        self.locks_taken += 1

    def unlock(self, claim: ClaimKey) -> None:
        """Undo a lock, if there is one."""
        node, anchor = self._locks.pop(claim, None), self._pins.pop(claim, None)
        if anchor is not None:
            anchor.pins -= 1
        if node is not None:
            self._cache.unlock(node)

    def rank(self, claim: ClaimKey, place: ClaimPlace, length: int, priority: int) -> None:
        """Give a path a priority, split where it ends."""
        end = self._ranks[claim] = self._cache.tree.cut(place.keys[:length])
        for node in self._cache.tree.path(end):
            node.ranks[claim] = priority

    def unrank(self, claim: ClaimKey) -> None:
        """Undo a rank, if there is one."""
        end = self._ranks.pop(claim, None)
        if end is not None:
            for node in self._cache.tree.path(end):
                node.ranks.pop(claim, None)

    def free(self) -> int:
        """Return the number of free slots."""
        return self._cache.free_count

    def clear(self) -> None:
        """Let go of everything."""
        for claim in list(self._locks):
            self.unlock(claim)
        for claim in list(self._ranks):
            self.unrank(claim)

    def reached(self, gone: Sequence[Node]) -> list[ClaimKey]:
        """Return claims that rank any of these nodes, which were evicted."""
        hit = {key for node in gone for key in node.ranks}
        keys = [key for key in self._ranks if key in hit]
        out = set(gone) if keys else set()
        for key in keys:
            self._ranks[key] = _left(self._ranks[key], out)
        return keys

    def passed_over(self, gone: Sequence[Node]) -> list[ClaimKey]:
        """Return claims that rank a leaf older than one of these, which their priority saved.

        Args:
            gone: nodes that were evicted, the last ones.
        """
        newest: dict[int, int] = {}
        for node in gone if self._ranks else ():
            newest[node.rank] = max(node.last_access, newest.get(node.rank, 0))
        return [
            key
            for key, end in self._ranks.items()
            if _evictable(end)
            and any(r < end.ranks[key] and used > end.last_access for r, used in newest.items())
        ]

    def locked(self) -> list[Node]:
        """Return the nodes at which locked paths end."""
        return list(self._locks.values())

    def check_integrity(self) -> None:
        """Check that nodes have the ranks that claims gave them, and no others.

        Raises:
            IntegrityError: a node has other ranks.
        """
        expected: dict[Node, Counter[Hashable]] = {}
        for claim, end in self._ranks.items():
            for node in self._cache.tree.path(end):
                expected.setdefault(node, Counter()).update([claim])
        for node in self._cache.tree.nodes():
            if node.ranks.keys() != expected.get(node, Counter()).keys():
                raise IntegrityError("a radix node has other ranks than claims gave it")


def _left(node: Node, out: set[Node]) -> Node:
    """Return the lowest ancestor that is still in the tree, or the node itself."""
    while node in out and node.parent is not None:
        node = node.parent
    return node


def _evictable(node: Node) -> bool:
    in_tree = node.parent is not None and not node.detached
    return in_tree and not node.children and node.locks == 0
