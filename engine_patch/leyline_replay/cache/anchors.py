"""Anchors in the radix tree: the positions of cached paths at which sequences can be continued.

::

    root ──[0 ── 64)── node ──[64 ── 100)── node        states at 64 and at 100: one per node's end
                                 ░░░░░░░░▓▓▓▓           rows of windowed layers: dropped, alive
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from leyline_engine.admit.anchors import Anchors
from leyline_replay.cache.integrity import IntegrityError
from leyline_replay.cache.radix import EMPTY_SLOTS, Node, RadixTree
from leyline_replay.cache.states import StatePool

Alive = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Anchoring:
    """An operator's choice of what is kept per sequence."""

    grid: int = 64
    """A forward leaves a recurrent state at a multiple of so many tokens from where it started."""
    slots: int = 128
    """Recurrent states that are kept at most."""
    window_tokens: int = 0
    """Cached tokens whose rows windowed layers keep at most; 0 for all."""


class AnchorStore:
    """The states of one tree's nodes, and the rows that its windowed layers still have.

    Args:
        states: None if the model has no recurrent layers.
        window: rows in front of a position that windowed layers read there; 0 for none.
        anchoring: the operator's choice.
        alive: by slot, True if windowed layers have its row; see :attr:`.KVPool.alive`.
    """

    def __init__(
        self,
        tree: RadixTree,
        states: StatePool | None,
        *,
        anchoring: Anchoring = Anchoring(1),
        window: int = 0,
        alive: Alive | None = None,
    ) -> None:
        self.states, self.window = states, window
        self.grid, self.window_tokens = anchoring.grid, anchoring.window_tokens
        self._tree = tree
        self._alive = np.empty(0, dtype=np.bool_) if alive is None else alive
        self._nodes: dict[int, Node] = {}
        """The node of each slot whose state is in the tree."""
        self._used: dict[int, int] = {}
        """Number of each slot's last use."""
        self._uses = 0

    @property
    def needed(self) -> bool:
        """True if the model keeps anything but rows."""
        return self.states is not None or self.window > 0

    def of(self, keys: array[int], limit: int | None = None) -> Anchors:
        """Return the anchors of the cached part of ``keys[:limit]``; nothing is touched."""
        path = list(self._tree.walk(keys, limit))
        length = sum(same for _, same in path)
        found = Anchors.everywhere(length)
        if self.states is not None:
            found = Anchors.at(end for end, node in _ends(path) if node.state is not None)
        if self.window:
            slots = [node.slots[:same] for node, same in path]
            alive = self._alive[np.concatenate(slots) if slots else EMPTY_SLOTS]
            found = found.common(Anchors(tuple(_windowed(alive, self.window))))
        return found

    def slot(self, keys: array[int], position: int) -> int:
        """Return the slot of the state in front of a position of a cached path, and note its use.

        Raises:
            KeyError: there is none.
        """
        for end, node in _ends(list(self._tree.walk(keys, position))):
            if end == position and node.state is not None:
                self._use(node.state)
                return node.state
        raise KeyError(position)

    def _use(self, slot: int) -> None:
        self._uses += 1
        self._used[slot] = self._uses

    def take(self, spared: Collection[int] = ()) -> int | None:
        """Return a slot for a state; the tree gives one up if none is free.

        Args:
            spared: slots that it must not give up.
        """
        if self.states is None:
            return None
        slot = self.states.take()
        if slot is None:
            old = [
                each for each, node in self._nodes.items() if each not in spared and not node.pins
            ]
            if not old:
                return None
            oldest = min(old, key=lambda each: (self._nodes[each].rank, self._used[each]))
            self.states.release(self.pick([self._nodes[oldest]]))
            slot = self.states.take()
        return slot

    def publish(self, keys: array[int], states: Mapping[int, int]) -> None:
        """Give the tree states of a cached path, by position; slots that it has no use for are
        released."""
        spare: list[int] = []
        for position, slot in states.items():
            node = self._tree.cut(keys[:position])
            if position % self._tree.page or node.state is not None:
                spare.append(slot)
                continue
            node.state = slot
            self._nodes[slot] = node
            self._use(slot)
        if self.states is not None and spare:
            self.states.release(spare)

    def pick(self, nodes: Iterable[Node]) -> list[int]:
        """Take nodes' states out of the tree, and return their slots."""
        found: list[int] = []
        for node in nodes:
            if node.state is not None:
                found.append(node.state)
                del self._nodes[node.state]
                node.state = None
        return found

    def evicted(self, nodes: Iterable[Node]) -> None:
        """Release the states of nodes that were evicted."""
        if self.states is not None and (slots := self.pick(nodes)):
            self.states.release(slots)

    def pin(self, end: Node) -> Node | None:
        """Keep the last state of a path for a claim; returns its node, to be unpinned, if any."""
        for node in self._tree.path(end):
            if node.state is not None:
                node.pins += 1
                return node
        return None

    def drop_windows(self) -> None:
        """Drop the least recently used rows of windowed layers, as far as they keep too many."""
        if not self.window_tokens > 0:
            return
        nodes = [node for node in self._tree.nodes() if self._alive[node.slots].any()]
        surplus = sum(int(self._alive[node.slots].sum()) for node in nodes) - self.window_tokens
        for node in sorted(nodes, key=lambda each: each.order):
            if surplus <= 0:
                return
            if node.locks == 0:
                surplus -= int(self._alive[node.slots].sum())
                self._alive[node.slots] = False

    def check(self, in_flight: Sequence[int]) -> None:
        """Check that every state slot has one owner.

        Args:
            in_flight: slots that running requests have.

        Raises:
            IntegrityError: says what doesn't add up.
        """
        if self.states is None:
            return
        of_tree = {node.state for node in self._tree.nodes() if node.state is not None}
        if of_tree != set(self._nodes):
            raise IntegrityError("a state belongs to another node than is noted")
        every = [*self.states.free_slots().tolist(), *of_tree, *in_flight]
        if sorted(every) != list(range(self.states.capacity)):
            raise IntegrityError(f"{len(every)} claims on {self.states.capacity} state slots")


def _ends(path: Sequence[tuple[Node, int]]) -> list[tuple[int, Node]]:
    """Return the nodes that a path covers whole, by their ends."""
    found: list[tuple[int, Node]] = []
    at = 0
    for node, same in path:
        at += same
        if same == len(node.keys):
            found.append((at, node))
    return found


def _windowed(alive: Alive, window: int) -> Iterable[tuple[int, int]]:
    """Yield the groups of positions in front of which a window's rows are alive."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], alive, [False]]).astype(np.int8)))
    if not len(alive) or not alive[0]:
        yield 0, 0
    for start, end in edges.reshape(-1, 2).tolist():
        first = 0 if start == 0 else start + window
        if first <= end:
            yield first, end
