"""The tree as claims see it: it keeps some KV, evicts some later, and nothing else notices."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.examples import examples

from leyline_engine.claims.place import ClaimPlace
from leyline_engine.claims.protection import ClaimKey
from leyline_engine.metrics import NoMetrics
from leyline_engine.records.ledger import SpanLedger
from leyline_engine.records.sources import SourceRegistry, SourceTurn
from leyline_replay.cache.integrity import IntegrityError
from leyline_replay.cache.manager import CacheManager
from leyline_replay.cache.radix import RadixTree
from leyline_replay.cache.shelf import TreeShelf

Prefix = tuple[int, ...]
A, B = ("t", "a"), ("t", "b")


class Eraser:
    """A pool without content."""

    def erase(self, slots: object) -> None:
        """Nothing to overwrite."""

    def leave(self, slots: object) -> None:
        """Nothing is held."""

    def left(self) -> list[int]:
        """No slot holds anything."""
        return []


def make_cache(capacity: int = 100) -> CacheManager:
    """A cache over no pool."""
    pool: object = Eraser()
    return CacheManager(pool, capacity, SourceRegistry(), SpanLedger(), NoMetrics())  # type: ignore[arg-type]


def fill(cache: CacheManager, keys: Prefix) -> None:
    """Have a request publish a sequence and end."""
    match = cache.match(array("q", keys))
    cache.lock(match.node)
    slots = cache.allocate(len(keys) - match.length)
    held = np.concatenate([match.slots, slots])
    end = cache.publish(array("q", keys), held, match.length, match.node, None).node
    cache.unlock(end)


def keys_of(*numbers: int) -> array[int]:
    """Radix keys."""
    return array("q", numbers)


def path_of(*numbers: int) -> ClaimPlace:
    """The place of a claim on a whole path."""
    keys = keys_of(*numbers)
    return ClaimPlace(keys, 0, len(keys), 0, SourceTurn("t", keys, "", (), "t"))


def cached(cache: CacheManager) -> set[Prefix]:
    """Every cached prefix."""
    found: set[Prefix] = set()

    def walk(node: object, path: Prefix) -> None:
        for key in node.keys:  # type: ignore[attr-defined]
            path += (key,)
            found.add(path)
        for child in node.children.values():  # type: ignore[attr-defined]
            walk(child, path)

    walk(cache.tree.root, ())
    return found


def test_a_lock_holds_its_path_and_no_neighbour() -> None:
    """The node is split at the edge; the part after it can be evicted."""
    cache = make_cache(10)
    shelf = TreeShelf(cache)
    fill(cache, (1, 2, 3, 4, 5))
    shelf.lock(A, path_of(1, 2, 3), 3)
    assert cache.tree.evictable_count() == 2
    cache.tree.evict(10)
    assert cached(cache) == {(1,), (1, 2), (1, 2, 3)}
    shelf.unlock(A)
    shelf.unlock(A)
    assert cache.tree.evictable_count() == 3


def test_looking_locking_and_ranking_touch_nobodys_recency() -> None:
    """The least recently used still goes first."""
    cache = make_cache(10)
    shelf = TreeShelf(cache)
    fill(cache, (1, 2))
    fill(cache, (3, 4))
    assert len(shelf.slots(path_of(1, 2, 9))) == 2
    assert len(list(cache.tree.nodes())) == 2
    shelf.lock(A, path_of(1), 1)
    shelf.rank(B, path_of(1, 2), 2, 0)
    shelf.unlock(A)
    cache.tree.evict(1)
    assert (3, 4) in cached(cache) and (1, 2) not in cached(cache)


def test_what_ranks_higher_goes_later_and_equal_ranks_by_recency() -> None:
    """Rank first; of two claims over a node the higher counts, until it is gone."""
    cache = make_cache(20)
    shelf = TreeShelf(cache)
    for first in (1, 3, 5):
        fill(cache, (first, first + 1))
    shelf.rank(A, path_of(1, 2), 2, 2)
    shelf.rank(B, path_of(1, 2), 2, 7)
    shelf.rank(("t", "c"), path_of(3, 4), 2, 5)
    cache.tree.evict(1)
    assert {prefix[0] for prefix in cached(cache)} == {1, 3}
    cache.tree.evict(1)
    assert {prefix[0] for prefix in cached(cache)} == {1}
    fill(cache, (5, 6))
    shelf.unrank(B)
    shelf.rank(("t", "d"), path_of(5, 6), 2, 3)
    cache.tree.evict(1)
    assert {prefix[0] for prefix in cached(cache)} == {5}


def test_a_rank_stays_with_both_halves_of_a_node_that_splits() -> None:
    """It is taken back from both."""
    cache = make_cache(20)
    shelf = TreeShelf(cache)
    fill(cache, (1, 2, 3, 4))
    shelf.rank(A, path_of(1, 2, 3, 4), 4, 4)
    fill(cache, (1, 2, 9))
    assert {node.rank for node in cache.tree.nodes()} == {0, 4}
    shelf.check_integrity()
    shelf.unrank(A)
    assert {node.rank for node in cache.tree.nodes()} == {0}
    shelf.check_integrity()


def test_the_claims_that_an_eviction_reached_and_passed_over_are_told_apart() -> None:
    """Reached: it lost a node. Passed over: an older leaf of it stayed for its priority."""
    cache = make_cache(20)
    shelf = TreeShelf(cache)
    fill(cache, (1, 2))
    fill(cache, (3, 4))
    fill(cache, (5, 6))
    shelf.rank(A, path_of(1, 2), 2, 5)
    shelf.rank(B, path_of(3, 4), 2, 0)
    gone = cache.tree.evict_nodes(1)
    assert shelf.reached(gone) == [B]
    assert shelf.passed_over(gone) == [A]
    gone = cache.tree.evict_nodes(1)
    assert shelf.reached(gone) == []
    assert shelf.passed_over(gone) == [A]
    gone = cache.tree.evict_nodes(1)
    assert shelf.reached(gone) == [A]
    assert shelf.passed_over(gone) == []
    shelf.unrank(A)
    shelf.unrank(B)


def test_a_leaf_that_is_younger_or_in_use_was_not_passed_over() -> None:
    """Its priority saved it from nothing."""
    cache = make_cache(20)
    shelf = TreeShelf(cache)
    fill(cache, (1, 2))
    fill(cache, (3, 4))
    shelf.rank(A, path_of(3, 4), 2, 5)
    fill(cache, (5, 6))
    shelf.rank(B, path_of(5, 6), 2, 5)
    shelf.lock(B, path_of(5, 6), 2)
    assert shelf.passed_over(cache.tree.evict_nodes(1)) == []


def test_ranks_that_nobody_gave_are_found() -> None:
    """So are ranks that somebody gave and a node lacks."""
    cache = make_cache()
    shelf = TreeShelf(cache)
    fill(cache, (1, 2))
    node = next(iter(cache.tree.nodes()))
    node.ranks[A] = 3
    with pytest.raises(IntegrityError):
        shelf.check_integrity()
    node.ranks.clear()
    shelf.rank(A, path_of(1, 2), 2, 3)
    node.ranks.clear()
    with pytest.raises(IntegrityError):
        shelf.check_integrity()


KEYS = st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple)
CLAIMS = st.sampled_from([("t", name) for name in "abcd"])


class ShelfMachine(RuleBasedStateMachine):
    """Against a set of prefixes with the time of their last use, one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = make_cache(60)
        self.shelf = TreeShelf(self.cache)
        self.used: dict[Prefix, int] = {}
        self.uses = 0
        self.locks: dict[ClaimKey, Prefix] = {}
        self.ranks: dict[ClaimKey, tuple[Prefix, int]] = {}

    def _prefix(self, keys: Prefix) -> Prefix:
        length = 0
        while length < len(keys) and keys[: length + 1] in self.used:
            length += 1
        return keys[:length]

    def _locked(self, prefix: Prefix) -> bool:
        return any(path[: len(prefix)] == prefix for path in self.locks.values())

    def _rank(self, prefix: Prefix) -> int:
        found = (p for path, p in self.ranks.values() if path[: len(prefix)] == prefix)
        return max(found, default=0)

    @precondition(lambda self: self.cache.free_count > 20)
    @rule(keys=KEYS)
    def fill(self, keys: Prefix) -> None:
        """A request comes and goes."""
        fill(self.cache, keys)
        self.uses += 1
        for end in range(1, len(keys) + 1):
            self.used[keys[:end]] = self.uses

    @rule(keys=KEYS)
    def look(self, keys: Prefix) -> None:
        """The slots are those of a match, and the tree stays as it was."""
        before = [(id(node), node.last_access) for node in self.cache.tree.nodes()]
        slots = list(self.shelf.slots(path_of(*keys)))
        assert [(id(node), node.last_access) for node in self.cache.tree.nodes()] == before
        assert len(slots) == len(self._prefix(keys)) == len(set(slots))

    @rule(claim=CLAIMS, keys=KEYS)
    def lock(self, claim: ClaimKey, keys: Prefix) -> None:
        """Once per claim, what there is of a path."""
        path = self._prefix(keys)
        if claim not in self.locks and path:
            self.shelf.lock(claim, path_of(*path), len(path))
            self.locks[claim] = path

    @rule(claim=CLAIMS, keys=KEYS, priority=st.integers(0, 3))
    def rank(self, claim: ClaimKey, keys: Prefix, priority: int) -> None:
        """Once per claim, what there is of a path."""
        path = self._prefix(keys)
        if claim not in self.ranks and path:
            self.shelf.rank(claim, path_of(*keys), len(keys), priority)
            self.ranks[claim] = (path, priority)

    @rule(claim=CLAIMS)
    def let_go(self, claim: ClaimKey) -> None:
        """Of whatever it holds."""
        self.shelf.unlock(claim)
        self.shelf.unrank(claim)
        self.locks.pop(claim, None)
        self.ranks.pop(claim, None)

    @rule(count=st.integers(1, 12))
    def evict(self, count: int) -> None:
        """Nothing locked goes, nothing goes before what it outranks, and claims hear of it."""
        gone = self.cache.tree.evict_nodes(count)
        self.cache.release(np.concatenate([[], *(node.slots for node in gone)]).astype(np.int64))
        lost = self.used.keys() - cached(self.cache)
        assert not any(self._locked(prefix) for prefix in lost)
        stays = self.used.keys() - lost
        leaves = [p for p in stays if not any((*p, key) in stays for key in range(3))]
        for leaf in leaves:
            if not self._locked(leaf):
                order = (self._rank(leaf), self.used[leaf])
                # A node goes as a whole, so only prefixes that went alone are compared.
                assert all(
                    (self._rank(prefix), self.used[prefix]) <= order
                    for prefix in lost
                    if not any((*prefix, key) in lost for key in range(3))
                )
        reached = {claim for claim, (path, _) in self.ranks.items() if path in lost}
        assert set(self.shelf.reached(gone)) == reached
        for claim in self.shelf.passed_over(gone):
            path, priority = self.ranks[claim]
            assert self._prefix(path) and priority > 0
            assert any(self.used[p] > self.used[self._prefix(path)] for p in lost) or (
                claim in reached
            )
        for prefix in lost:
            del self.used[prefix]
        for claim in reached:
            path, priority = self.ranks.pop(claim)
            left = self._prefix(path)
            self.shelf.unrank(claim)
            if left:
                self.shelf.rank(claim, path_of(*left), len(left), priority)
                self.ranks[claim] = (left, priority)

    @invariant()
    def agrees(self) -> None:
        """The same prefixes, locks and ranks; every slot owned once."""
        assert cached(self.cache) == self.used.keys()
        self.cache.check_integrity([], self.shelf.locked())
        self.shelf.check_integrity()

        def walk(node: object, path: Prefix) -> None:
            for key in node.keys:  # type: ignore[attr-defined]
                path += (key,)
                assert (node.locks > 0) == self._locked(path)  # type: ignore[attr-defined]
                assert node.rank == self._rank(path)  # type: ignore[attr-defined]
            for child in node.children.values():  # type: ignore[attr-defined]
                walk(child, path)

        walk(self.cache.tree.root, ())


def test_the_shelf_agrees_with_a_naive_one() -> None:
    """They agree whatever claims lock and rank, and whatever is evicted in between."""
    run_state_machine_as_test(
        ShelfMachine,
        settings=settings(max_examples=examples(150), stateful_step_count=40, deadline=None),
    )


def test_peek_finds_what_match_would() -> None:
    """It does so under a limit, and in an empty tree, too."""
    tree = RadixTree()
    assert len(tree.peek(keys_of(1))) == 0
    tree.insert(keys_of(1, 2, 3), np.array([7, 8, 9]), "a")
    assert tree.peek(keys_of(1, 2, 4)).tolist() == [7, 8]
    assert tree.peek(keys_of(1, 2, 3), 1).tolist() == [7]
    assert tree.match(keys_of(1, 2, 3), 1).slots.tolist() == [7]
