"""The radix tree over int64 keys. A node holds one slot per key, and its publishers.

::

    root ──[k0 k1 k2]── node ──[k3 k4]── leaf        slots of a path, in key order
                          └────[k3' …]── leaf

``match`` and ``cut`` split a node when a key sequence ends inside it; nothing else changes the tree
but ``insert``, ``evict`` and ``detach``. Recency is a counter, never a clock. With pages of several
keys, nodes begin and end at their edges, and a partial page at a sequence's end isn't there.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from leyline_engine.admit.plan import page_floor
from leyline_engine.contract import common_prefix
from leyline_engine.records.lineage import exact_length
from leyline_replay.cache.slots import Slots

SHARED = None
"""Owner of nodes that no session claims, or that too many do."""

MAX_OWNERS = 64
"""Maximum number of owners noted per node; a prefix that more sessions sent is simply shared."""

_USE_BITS = 63
"""Bits of a use's number, at most."""

EMPTY_SLOTS: Slots = np.empty(0, dtype=np.int64)


class Node:
    """A run of keys with their slots; ``locks`` counts its holders on or below it."""

    __slots__ = (
        "children",
        "detached",
        "keys",
        "last_access",
        "locks",
        "owners",
        "parent",
        "pins",
        "ranks",
        "serial",
        "slots",
        "state",
    )

    def __init__(self, parent: Node | None, keys: array[int], slots: Slots, serial: int) -> None:
        self.parent = parent
        self.keys = keys
        self.slots = slots
        self.serial = serial
        self.children: dict[Hashable, Node] = {}
        """Children by their first page; see :meth:`RadixTree.name`."""
        self.owners: set[Hashable] = set()
        """Publishers of this run of keys; an owner of a node owns its ancestors too."""
        self.ranks: dict[Hashable, int] = {}
        """Priorities, by who gave them; as with owners, a node's are its ancestors' too."""
        self.state: int | None = None
        """Slot of the state after its last key, if that is cached."""
        self.pins = 0
        """Number of claims that need this state."""
        self.locks = 0
        self.last_access = 0
        self.detached = False

    @property
    def rank(self) -> int:
        """Rank of the node; nodes of lower rank are evicted first."""
        return max(self.ranks.values()) if self.ranks else 0

    @property
    def order(self) -> int:
        """Key of eviction, lowest first: by rank, then by last use."""
        return (self.rank << _USE_BITS) + self.last_access


class Match(NamedTuple):
    """The longest cached prefix of a key sequence."""

    length: int
    node: Node
    slots: Slots


class RadixTree:
    """A tree that shares prefixes; unlocked leaves are evicted by rank, lowest first, then LRU."""

    def __init__(self, page: int = 1) -> None:
        self.page = page
        """Keys per page."""
        self.root = Node(None, array("q"), EMPTY_SLOTS, 0)
        self._doomed: set[Node] = set()
        self._tick = 0
        self._serial = 0
        self.exact = 0
        """Number of slots under plain keys; :attr:`spliced` counts all others."""
        self.spliced = 0

    def _new_node(self, parent: Node, keys: array[int], slots: Slots) -> Node:
        self._serial += 1
        node = Node(parent, keys, slots, self._serial)
        node.last_access = self._tick
        return node

    def name(self, keys: array[int], at: int = 0) -> Hashable:
        """Return the name of a page of ``keys``, which begins ``at``: children have it."""
        return keys[at] if self.page == 1 else keys[at : at + self.page].tobytes()

    def nodes(self) -> Iterator[Node]:
        """Yield every node below the root, parents first, without detached ones."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def doomed(self) -> tuple[Node, ...]:
        """Return the detached nodes that a running request still holds."""
        return tuple(self._doomed)

    def cached_count(self) -> int:
        return sum(len(node.slots) for node in self.nodes())

    def match(self, keys: array[int], limit: int | None = None) -> Match:
        """Return the longest cached prefix of ``keys[:limit]``; splits the node it ends inside."""
        self._tick += 1
        node, length = self.root, 0
        found: list[Slots] = []
        for child, same in self.walk(keys, limit):
            node = child if same == len(child.keys) else self._split(child, same)
            node.last_access = self._tick
            found.append(node.slots)
            length += same
        return Match(length, node, np.concatenate(found) if found else EMPTY_SLOTS)

    def walk(self, keys: array[int], limit: int | None) -> Iterator[tuple[Node, int]]:
        """Yield the nodes of the longest prefix of ``keys[:limit]``, with the keys each shares."""
        end = len(keys) if limit is None else min(limit, len(keys))
        end = page_floor(end, self.page)
        node, length = self.root, 0
        while length < end:
            child = node.children.get(self.name(keys, length))
            if child is None:
                return
            same = min(common_prefix(keys, child.keys, length), end - length)
            same = page_floor(same, self.page)
            whole = same == len(child.keys)
            yield child, same
            if not whole:
                return
            length += same
            node = child

    def peek(self, keys: array[int], limit: int | None = None) -> Slots:
        """Return the slots of :meth:`match`'s prefix; nothing is split or touched."""
        found = [node.slots[:same] for node, same in self.walk(keys, limit)]
        return np.concatenate(found) if found else EMPTY_SLOTS

    def cut(self, keys: array[int]) -> Node:
        """Return the node that ends where the longest prefix of ``keys`` does; keeps recency."""
        node = self.root
        for child, same in self.walk(keys, None):
            node = child if same == len(child.keys) else self._split(child, same)
        return node

    def split(self, node: Node, at: int) -> tuple[Node | None, Node | None]:
        """Return ``node`` as its first ``at`` keys and the rest; an empty part is None.

        The page that has the key ``at`` goes with the rest.
        """
        at = page_floor(at, self.page)
        if at == 0:
            return None, node
        if at == len(node.keys):
            return node, None
        return self._split(node, at), node

    def _split(self, node: Node, at: int) -> Node:
        """Split ``node`` into ``[0, at)`` (returned) and the rest, its only child."""
        parent = node.parent
        assert parent is not None and 0 < at < len(node.keys)  # noqa: S101 - caller's contract
        head = self._new_node(parent, node.keys[:at], node.slots[:at])
        head.locks, head.last_access = node.locks, node.last_access
        head.owners, head.ranks = set(node.owners), dict(node.ranks)
        head.children[self.name(node.keys, at)] = node
        parent.children[self.name(head.keys)] = head
        node.parent, node.keys, node.slots = head, node.keys[at:], node.slots[at:]
        return head

    def insert(self, keys: array[int], slots: Slots, owner: Hashable) -> tuple[int, Match]:
        """Make ``keys`` cached with ``slots``, one per key, as published by ``owner``.

        Returns:
            The number of leading keys that were there already (their old slots stay; the caller
            still owns its own for those), and the whole sequence as it is cached now: without a
            partial page at its end, whose slots stay the caller's.
        """
        keys = keys[: page_floor(len(keys), self.page)]
        slots = slots[: len(keys)]
        match = self.match(keys)
        node = match.node
        held = np.concatenate([match.slots, slots[match.length :]])
        if match.length < len(keys):
            # From here on nothing can fail: the caller's slots become the tree's.
            child = self._new_node(node, keys[match.length :], slots[match.length :].copy())
            node.children[self.name(child.keys)] = child
            self._count(child, 1)
            node = child
        for ancestor in self.path(node):
            if SHARED not in ancestor.owners:
                ancestor.owners.add(owner)
                if len(ancestor.owners) > MAX_OWNERS:
                    ancestor.owners = {SHARED}
        return match.length, Match(len(keys), node, held)

    def path(self, node: Node) -> Iterator[Node]:
        """Yield ``node`` and its ancestors up to the root, which is left out."""
        current: Node | None = node
        while current is not None and current is not self.root:
            yield current
            current = current.parent

    def evictable_count(self) -> int:
        """Return the number of slots that eviction could free.

        An unlocked node has no locked descendant.
        """
        return sum(len(node.slots) for node in self.nodes() if node.locks == 0)

    def lock(self, node: Node) -> None:
        """Protect the path to ``node`` from eviction."""
        current: Node | None = node
        while current is not None:
            current.locks += 1
            current = current.parent

    def unlock(self, node: Node) -> list[Node]:
        """Undo one :meth:`lock`; return the doomed nodes without a holder."""
        released: list[Node] = []
        current: Node | None = node
        while current is not None:
            current.locks -= 1
            if current.detached and current.locks == 0:
                self._doomed.discard(current)
                released.append(current)
            current = current.parent
        return released

    def evict(self, count: int) -> Slots:
        """Evict as :meth:`evict_nodes`, and return the slots."""
        return slots_of(self.evict_nodes(count))

    def evict_nodes(self, count: int) -> list[Node]:
        """Drop unlocked leaves, the lowest rank and least recent use first, for ``count`` slots."""
        leaves = [
            (node.order if node.ranks else node.last_access, node.serial, node)
            for node in self.nodes()
            if not node.children and node.locks == 0
        ]
        heapq.heapify(leaves)
        released: list[Node] = []
        freed = 0
        while leaves and freed < count:
            _, _, node = heapq.heappop(leaves)
            parent = node.parent
            assert parent is not None  # noqa: S101 - the root is no leaf of this list
            del parent.children[self.name(node.keys)]
            released.append(node)
            self._count(node, -1)
            freed += len(node.slots)
            if parent is not self.root and not parent.children and parent.locks == 0:
                heapq.heappush(leaves, (parent.order, parent.serial, parent))
        return released

    def _count(self, node: Node, sign: int) -> None:
        """Count a node that was added or removed; a split changes nothing."""
        exact = exact_length(node.keys)
        self.exact += sign * exact
        self.spliced += sign * (len(node.keys) - exact)

    def check_counts(self) -> None:
        """Check :attr:`exact` and :attr:`spliced` against the nodes.

        Raises:
            AssertionError: they are wrong; a bug of this class.
        """
        exact = sum(exact_length(node.keys) for node in self.nodes())
        if (exact, exact + self.spliced) != (self.exact, self.cached_count()):
            raise AssertionError("the tree holds other tokens than it counted")

    def detach(self, node: Node) -> tuple[list[Node], list[Node]]:
        """Make the subtree of ``node`` unmatchable.

        Returns:
            Nodes whose slots are free now, and those that running requests still hold.
        """
        parent = node.parent
        assert parent is not None  # noqa: S101 - the root is never detached
        del parent.children[self.name(node.keys)]
        released: list[Node] = []
        held: list[Node] = []
        for current in subtree(node):
            current.detached = True
            self._count(current, -1)
            if current.locks:
                self._doomed.add(current)
                held.append(current)
            else:
                released.append(current)
        return released, held


def subtree(node: Node) -> Iterator[Node]:
    """Yield ``node`` and all below it, parents first."""
    stack = [node]
    while stack:
        current = stack.pop()
        yield current
        stack.extend(current.children.values())


def slots_of(nodes: Sequence[Node]) -> Slots:
    """Return the slots of several nodes."""
    return np.concatenate([node.slots for node in nodes]) if nodes else EMPTY_SLOTS
