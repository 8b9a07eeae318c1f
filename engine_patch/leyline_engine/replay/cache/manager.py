"""Pool, radix tree and retained turns as one thing: allocation, publication, forgetting.

Conservation, checked when idle and after every test::

    free + cached (tree) + doomed (detached, still held) + in flight = capacity
"""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from leyline_engine.lineage import exact_length
from leyline_engine.replay.cache.pool import KVPool, SlotAllocator, Slots
from leyline_engine.replay.cache.radix import EMPTY_SLOTS, SHARED, Match, Node, RadixTree
from leyline_engine.sources import SessionKey, SourceRegistry

log = logging.getLogger(__name__)

_EVICTION_BATCH = 64


class PoolExhaustedError(Exception):
    """Not enough slots, and nothing left to evict: try again when a request has finished."""


class IntegrityError(RuntimeError):
    """Slot accounting doesn't add up; a bug of the engine."""


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Slots by owner."""

    capacity: int
    free: int
    cached: int
    doomed: int
    in_flight: int


@dataclass(frozen=True, slots=True)
class ForgetResult:
    """Slots that a forget reached."""

    freed: int = 0
    """Overwritten and given back."""
    shared_retained: int = 0
    """Held by other sessions that sent the same tokens themselves; no longer this session's."""
    pending: int = 0
    """Unmatchable now; overwritten when the running request that holds them ends."""


class CacheManager:
    """Owns every slot that no running request owns."""

    def __init__(self, pool: KVPool, capacity: int, registry: SourceRegistry) -> None:
        self.pool = pool
        self.registry = registry
        self.tree = RadixTree()
        self.peak_used = 0
        self._allocator = SlotAllocator(capacity)
        self._unerased = EMPTY_SLOTS

    @property
    def capacity(self) -> int:
        return self._allocator.capacity

    def match(self, keys: array[int], limit: int | None = None) -> Match:
        return self.tree.match(keys, limit)

    def lock(self, node: Node) -> None:
        self.tree.lock(node)

    def unlock(self, node: Node) -> None:
        """Undo one lock; what was doomed and is now free is overwritten."""
        self.erase(self.tree.unlock(node))

    def allocate(self, count: int) -> Slots:
        """Slots for a running request, evicting what is least recently used if need be.

        Raises:
            PoolExhaustedError: with nothing taken.
        """
        missing = count - self._allocator.free_count
        if 0 < missing <= self.tree.evictable_count():
            self._allocator.release(self.tree.evict(max(missing, _EVICTION_BATCH)))
        slots = self._allocator.allocate(count)
        if slots is None:
            raise PoolExhaustedError(f"{count} slots wanted, {self._allocator.free_count} free")
        self.peak_used = max(self.peak_used, self.capacity - self._allocator.free_count)
        return slots

    def release(self, slots: Slots) -> None:
        """Take back a running request's own slots."""
        self._allocator.release(slots)

    def erase(self, slots: Slots) -> None:
        """Take back slots whose content must not outlive them: overwritten, then freed.

        Slots that can't be overwritten stay out of use, and are tried again the next time.
        """
        error = self._erase(slots)
        if error is not None:
            log.error("slots could not be overwritten: %s; they stay out of use", error)

    def _erase(self, slots: Slots) -> Exception | None:
        self._unerased = np.concatenate([self._unerased, slots])
        if len(self._unerased):
            try:
                self.pool.erase(self._unerased)
            except Exception as error:
                return error
            self._allocator.release(self._unerased)
            self._unerased = EMPTY_SLOTS
        return None

    def publish(
        self,
        keys: array[int],
        held: Slots,
        owned_from: int,
        node: Node,
        session: SessionKey | None,
    ) -> Match:
        """Hand a request's slots to the tree and move its lock along.

        ::

            keys   0 ───── tree's own ───── owned_from ───── request's ───── n
            insert 0 ───── already there ─────── dup ─┘──── becomes tree's ──┘

        Args:
            keys: keys of the whole sequence.
            held: one slot per key; those from ``owned_from`` on belong to the request.
            node: the node that the request holds locked.
            session: whose request it is; None for one that no session claims.

        Returns:
            The sequence as the tree has it now, locked in place of ``node``.
        """
        present, _ = self.tree.insert(keys, held, session)
        if present > owned_from:
            self._allocator.release(held[owned_from:present])
        match = self.tree.match(keys)
        self.tree.lock(match.node)
        self.unlock(node)
        return match

    def forget(self, session: SessionKey, prompt_keys: array[int]) -> ForgetResult:
        """Erase whatever a session published that isn't a prefix of its new prompt.

        The forgotten span stands in no place of the new prompt where an exact key could still
        match, so everything behind the divergence may have read it, and nothing before it has.
        What other sessions sent as well stays theirs, but no spliced KV does: another session
        that goes on with a lineage never sent the span that the lineage remembers.

        Raises:
            Exception: the pool's own, when slots can't be overwritten; they are out of use then.
        """
        spared = set(self.tree.path(self.tree.match(prompt_keys).node))
        freed = shared = pending = 0
        failure: Exception | None = None
        for node in list(self.tree.nodes()):
            if session not in node.owners or node in spared or node.detached:
                continue
            doomed: Node | None = node
            if len(node.owners) > 1:
                exact, doomed = self.tree.split(node, exact_length(node.keys))
                if exact is not None:
                    exact.owners.discard(session)
                    shared += len(exact.slots)
            if doomed is not None:
                released, held = self.tree.detach(doomed)
                failure = self._erase(released) or failure
                freed, pending = freed + len(released), pending + held
        if failure is not None:
            raise failure
        self.registry.drop_session(session)
        return ForgetResult(freed, shared, pending)

    def flush(self) -> None:
        """Drop every cached sequence and retained turn that no running request holds."""
        self.registry.clear()
        self._allocator.release(self.tree.evict(self.capacity))

    def stats(self, in_flight: int) -> PoolStats:
        doomed = sum(len(node.slots) for node in self.tree.doomed()) + len(self._unerased)
        return PoolStats(
            self.capacity, self._allocator.free_count, self.tree.cached_count(), doomed, in_flight
        )

    def check_integrity(self, in_flight: Iterable[Slots], held: Iterable[Node]) -> None:
        """Check conservation, single ownership, node shape and lock counts.

        Args:
            in_flight: slots owned by each running request.
            held: the node that each running request has locked.

        Raises:
            IntegrityError: saying what doesn't add up.
        """
        owned = [self._allocator.free_slots(), self._unerased, *in_flight]
        for node in (*self.tree.nodes(), *self.tree.doomed()):
            if not len(node.keys) == len(node.slots) > 0:
                raise IntegrityError("a radix node has not exactly one slot per key")
            owned.append(node.slots)
        every = np.concatenate(owned)
        if len(every) != self.capacity or len(np.unique(every)) != self.capacity:
            raise IntegrityError(
                f"{len(every)} slot claims, {len(np.unique(every))} distinct, {self.capacity} slots"
            )
        self._check_nodes()
        self._check_locks(held)

    def _check_nodes(self) -> None:
        for node in (self.tree.root, *self.tree.nodes()):
            if node.detached:
                raise IntegrityError("a detached radix node is still in the tree")
            for first_key, child in node.children.items():
                if child.keys[0] != first_key or child.parent is not node:
                    raise IntegrityError("a radix child isn't reachable under its first key")
                known = node is self.tree.root or SHARED in node.owners
                if not (known or child.owners <= node.owners):
                    raise IntegrityError("a radix node has an owner that its parent lacks")

    def _check_locks(self, held: Iterable[Node]) -> None:
        expected: Counter[Node] = Counter()
        for node in held:
            expected.update([*self.tree.path(node), self.tree.root])
        for node in (self.tree.root, *self.tree.nodes(), *self.tree.doomed()):
            if node.locks != expected[node]:
                raise IntegrityError(f"a radix node has {node.locks} locks, not {expected[node]}")
