"""The radix tree against a model: a dictionary from prefix to slot."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.examples import examples

from leyline_replay.cache import radix
from leyline_replay.cache.radix import (
    SHARED,
    Match,
    Node,
    RadixTree,
    common_prefix,
    slots_of,
)

KEYS = st.lists(st.integers(0, 2), min_size=1, max_size=10).map(tuple)
Prefix = tuple[int, ...]


class RadixMachine(RuleBasedStateMachine):
    """Every rule is mirrored in ``cached``; slots are never lost and never handed out twice."""

    @initialize()
    def start(self) -> None:
        self.tree = RadixTree()
        self.cached: dict[Prefix, int] = {}
        self.owners: dict[Prefix, set[str | None]] = {}
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(radix, "MAX_OWNERS", 2)
        self.held: list[tuple[Prefix, dict[Prefix, int], Match]] = []
        self.doomed: set[int] = set()
        self.next_slot = 0
        self.returned: set[int] = set()

    def _claim(self, prefix: Prefix, owner: str | None) -> None:
        owners = self.owners[prefix]
        if SHARED not in owners:
            owners.add(owner)
            if len(owners) > 2:
                self.owners[prefix] = {SHARED}

    def _found(self, keys: Prefix) -> int:
        length = 0
        while length < len(keys) and keys[: length + 1] in self.cached:
            length += 1
        return length

    def _locked(self) -> dict[Prefix, int]:
        """Prefixes that a held match protects, with the slots they had."""
        return {prefix: slot for _, slots, _ in self.held for prefix, slot in slots.items()}

    def _take_back(self, slots: np.ndarray) -> set[int]:
        values = slots.tolist()
        assert len(set(values)) == len(values)
        assert not self.returned & set(values)
        self.returned |= set(values)
        return set(values)

    @rule(keys=KEYS, owner=st.sampled_from([SHARED, "a", "b", "c", "d"]))
    def insert(self, keys: Prefix, owner: str | None) -> None:
        slots = np.arange(self.next_slot, self.next_slot + len(keys), dtype=np.int64)
        present, match = self.tree.insert(array("q", keys), slots, owner)
        node = match.node
        assert present == self._found(keys)
        assert not node.children or present == len(keys)
        self.returned |= set(slots[:present].tolist())
        for position in range(present, len(keys)):
            self.cached[keys[: position + 1]] = int(slots[position])
            self.owners[keys[: position + 1]] = set()
        for position in range(len(keys)):
            self._claim(keys[: position + 1], owner)
        self.next_slot += len(keys)

    @rule(keys=KEYS, limit=st.none() | st.integers(0, 12))
    def match(self, keys: Prefix, limit: int | None) -> None:
        end = len(keys) if limit is None else min(limit, len(keys))
        match = self.tree.match(array("q", keys), limit)
        assert match.length == self._found(keys[:end])
        expected = [self.cached[keys[: i + 1]] for i in range(match.length)]
        assert match.slots.tolist() == expected

    @rule(keys=KEYS)
    def lock(self, keys: Prefix) -> None:
        match = self.tree.match(array("q", keys))
        self.tree.lock(match.node)
        protected = keys[: match.length]
        slots = {protected[: i + 1]: int(match.slots[i]) for i in range(match.length)}
        self.held.append((protected, slots, match))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 100))
    def unlock(self, which: int) -> None:
        _, _, match = self.held.pop(which % len(self.held))
        released = self._take_back(slots_of(self.tree.unlock(match.node)))
        still = {slot for _, slots, _ in self.held for slot in slots.values()}
        assert released <= self.doomed
        assert not released & still
        self.doomed -= released
        assert self.doomed <= still

    @rule(count=st.integers(0, 20))
    def evict(self, count: int) -> None:
        locked = self._locked()
        before = dict(self.cached)
        released = self._take_back(self.tree.evict(count))
        gone = {prefix for prefix, slot in before.items() if slot in released}
        assert len(gone) == len(released)
        assert not any(locked.get(prefix) == before[prefix] for prefix in gone)
        for prefix in gone:
            del self.cached[prefix], self.owners[prefix]
        assert all(prefix[:-1] in self.cached for prefix in self.cached if len(prefix) > 1)
        evictable = [p for p, slot in before.items() if locked.get(p) != slot]
        assert len(released) >= min(count, len(evictable))

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def detach(self, data: st.DataObject) -> None:
        keys = data.draw(st.sampled_from(sorted(self.cached)))
        self.tree.match(array("q", keys), len(keys) - 1)
        parent = self.tree.match(array("q", keys), len(keys) - 1).node
        node = parent.children[keys[-1]]
        still = {slot for _, slots, _ in self.held for slot in slots.values()}
        under = {p: s for p, s in self.cached.items() if p[: len(keys)] == keys}
        released, held = self.tree.detach(node)
        back = self._take_back(slots_of(released))
        assert back == set(under.values()) - still
        assert set(slots_of(held).tolist()) == set(under.values()) - back
        self.doomed |= set(under.values()) - back
        for prefix in under:
            del self.cached[prefix], self.owners[prefix]

    @invariant()
    def conserves(self) -> None:
        if not hasattr(self, "tree"):
            return
        in_tree = [slot for node in self.tree.nodes() for slot in node.slots.tolist()]
        in_doomed = [slot for node in self.tree.doomed() for slot in node.slots.tolist()]
        assert sorted(in_tree) == sorted(self.cached.values())
        assert sorted(in_doomed) == sorted(self.doomed)
        assert self.tree.cached_count() == len(self.cached)
        assert set(in_tree) | set(in_doomed) | self.returned == set(range(self.next_slot))
        assert len(in_tree) + len(in_doomed) + len(self.returned) == self.next_slot
        assert self.tree.root.locks == len(self.held)
        self.tree.check_counts()

    @invariant()
    def every_key_has_its_owners(self) -> None:
        if not hasattr(self, "tree"):
            return
        assert self.owners.keys() == self.cached.keys()

        def walk(node: Node, path: Prefix) -> None:
            for key in node.keys:
                path += (key,)
                assert node.owners == self.owners[path]
            for child in node.children.values():
                walk(child, path)

        walk(self.tree.root, ())

    @invariant()
    def locks_add_up(self) -> None:
        if not hasattr(self, "tree"):
            return
        for node in self.tree.nodes():
            assert node.locks >= sum(child.locks for child in node.children.values())
            assert not node.detached
            assert len(node.keys) == len(node.slots) > 0

    def teardown(self) -> None:
        if hasattr(self, "patch"):
            self.patch.undo()


TestRadix = RadixMachine.TestCase
TestRadix.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)


def test_least_recently_used_goes_first() -> None:
    """Eviction follows the order of use, not that of insertion."""
    tree = RadixTree()
    for first in (1, 2, 3):
        tree.insert(array("q", [first, 9]), np.array([first * 2, first * 2 + 1]), "a")
    tree.match(array("q", [1, 9]))
    assert sorted(tree.evict(1).tolist()) == [4, 5]
    assert sorted(tree.evict(2).tolist()) == [6, 7]


def test_common_prefix_with_offset() -> None:
    """The offset applies to the first sequence only; past its end nothing is common."""
    assert common_prefix(array("q", [1, 2, 3, 4]), array("q", [3, 4, 5]), 2) == 2
    assert common_prefix(array("q", [1]), array("q", [1]), 5) == 0
    assert common_prefix(array("q"), array("q", [1])) == 0


def test_split_below_a_held_node_keeps_its_lock() -> None:
    """A node that splits after it was locked is unlocked as a whole."""
    tree = RadixTree()
    node = tree.insert(array("q", [1, 2, 3, 4]), np.arange(4), "a")[1].node
    tree.lock(node)
    tree.match(array("q", [1, 2, 9]))
    assert tree.evict(10).tolist() == []
    assert tree.unlock(node) == []
    assert sorted(tree.evict(10).tolist()) == [0, 1, 2, 3]
