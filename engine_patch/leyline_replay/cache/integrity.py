"""Checks that a pool's accounts add up: after every test, and when the engine is idle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from leyline_replay.cache.radix import SHARED, Node, RadixTree
from leyline_replay.cache.slots import Slots


class IntegrityError(RuntimeError):
    """Slot accounting doesn't add up; a bug of the engine."""


def check_slots(owned: Sequence[Slots], capacity: int) -> None:
    """Check that every slot has one owner.

    Args:
        owned: the slots of each owner.

    Raises:
        IntegrityError: says what doesn't add up.
    """
    every = np.concatenate(owned)
    distinct = len(np.unique(every))
    if len(every) != capacity or distinct != capacity:
        raise IntegrityError(f"{len(every)} slot claims, {distinct} distinct, {capacity} slots")


def check_nodes(tree: RadixTree) -> None:
    """Check the shape of a tree's nodes, and that owners of a node own its parent.

    Raises:
        IntegrityError: says what is wrong.
    """
    for node in (*tree.nodes(), *tree.doomed()):
        if not len(node.keys) == len(node.slots) > 0:
            raise IntegrityError("a radix node has not exactly one slot per key")
        if len(node.keys) % tree.page:
            raise IntegrityError("a radix node has a part of a page")
    for node in (tree.root, *tree.nodes()):
        if node.detached:
            raise IntegrityError("a detached radix node is still in the tree")
        for first_key, child in node.children.items():
            if tree.name(child.keys) != first_key or child.parent is not node:
                raise IntegrityError("a radix child isn't reachable under its first key")
            known = node is tree.root or SHARED in node.owners
            if not (known or child.owners <= node.owners):
                raise IntegrityError("a radix node has an owner that its parent lacks")


def check_locks(tree: RadixTree, held: Iterable[Node]) -> None:
    """Check that nodes have as many locks as holders.

    Args:
        held: the node that each holder has locked.

    Raises:
        IntegrityError: a node has more, or fewer.
    """
    expected: Counter[Node] = Counter()
    for node in held:
        expected.update([*tree.path(node), tree.root])
    for node in (tree.root, *tree.nodes(), *tree.doomed()):
        if node.locks != expected[node]:
            raise IntegrityError(f"a radix node has {node.locks} locks, not {expected[node]}")


def check_anchors(anchors: Collection[int], cached: Sequence[Slots]) -> None:
    """Check that every entry of the index of content is anchored at a cached slot.

    Raises:
        IntegrityError: one is anchored elsewhere.
    """
    slots = set(np.concatenate(cached).tolist()) if cached else set()
    if not slots.issuperset(anchors):
        raise IntegrityError("the index of content has an entry at a slot that isn't cached")
