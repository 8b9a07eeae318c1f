"""SGLang's tree as claims see it: locks on paths, and an eviction order with priorities.

SGLang evicts the least recently used leaf; a node's own priority can only rise. So ranked paths are
locked while an eviction passes over all others, and unlocked in order of rank if that wasn't
enough. Between evictions they count as evictable, like all unused KV.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

from sglang.srt.mem_cache.base_prefix_cache import EvictParams, EvictResult, TreeLock
from sglang.srt.mem_cache.radix_cache import RadixKey

from leyline_engine.claims.place import ClaimPlace
from leyline_engine.claims.protection import ClaimKey
from leyline_engine.records.publications import Space

Evict = Callable[[EvictParams], EvictResult]


def not_evicted(params: EvictParams, result: EvictResult) -> EvictParams | None:
    """Return what an eviction was to free and didn't; None if it freed enough."""
    rows = max(0, params.num_tokens - result.num_tokens_evicted)
    windowed = max(0, params.swa_num_tokens - result.swa_num_tokens_evicted)
    states = max(0, params.mamba_num - result.mamba_num_evicted)
    if not (rows or windowed or states):
        return None
    return EvictParams(num_tokens=rows, swa_num_tokens=windowed, mamba_num=states)


def add_evicted(result: EvictResult, more: EvictResult) -> None:
    """Add to the result of an eviction that of another."""
    result.num_tokens_evicted += more.num_tokens_evicted
    result.swa_num_tokens_evicted += more.swa_num_tokens_evicted
    result.mamba_num_evicted += more.mamba_num_evicted


class Tree(Protocol):
    """The part of the radix cache that a shelf needs; see :class:`.radix.LeylineRadixCache`."""

    row_allocator: Any
    tree_core: Any
    speculative: str
    cache_controller: Any

    def find(self, keys: array[int], space: Space, limit: int | None = None) -> Any: ...
    def allowed_length(self, keys: array[int]) -> int: ...
    def path_device_indices(self, node: Any) -> Any: ...
    def lock(self, node: Any) -> Any: ...
    def lock_rows(self, keys: array[int], space: Space, length: int) -> Any: ...
    def unlock(self, lock: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class _Ranked:
    keys: array[int] = field(hash=False, compare=False)
    priority: int


class RadixShelf:
    """SGLang's tree as a :class:`leyline_engine.claims.keeper.Shelf`.

    Args:
        tree: tree of the claims, in the namespace of requests that name none.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._locks: dict[ClaimKey, tuple[TreeLock, ...]] = {}
        self._ranked: dict[ClaimKey, _Ranked] = {}
        self.gave_way: Callable[[Sequence[ClaimKey]], None] = lambda _: None
        """Called with ranked claims that an eviction may have reached."""
        self.passed_over: Callable[[Sequence[ClaimKey]], None] = lambda _: None
        """Called with those that it passed over."""

    def slots(self, place: ClaimPlace) -> Sequence[int]:
        """Return the slots of a path's cached part; nothing is split or touched."""
        return self.cached(place.keys)

    def cached(self, keys: array[int]) -> Sequence[int]:
        """Return the slots of the cached prefix of ``keys``."""
        return self.all_slots(keys[: self._tree.allowed_length(keys)])

    def all_slots(self, keys: array[int]) -> Sequence[int]:
        """Return the same, with slots that wait to be removed."""
        length, node = self._peek(keys)
        if not length:
            return ()
        found: list[int] = self._tree.path_device_indices(node)[:length].tolist()
        return found

    def _peek(self, keys: array[int]) -> tuple[int, Any]:
        length, node, _ = self._tree.tree_core.match_full_device_prefix(RadixKey(keys))
        return int(length), node

    def lock(self, claim: ClaimKey, place: ClaimPlace, length: int) -> None:
        """Lock a path, split where it ends."""
        self._locks[claim] = self._held(place.keys[:length])

    def _held(self, keys: array[int]) -> tuple[TreeLock, ...]:
        """Lock the cached rows of a path, and the state at its last anchor."""
        anchor = self._tree.find(keys, Space())
        lock = self._tree.lock(anchor.last_device_node)
        if anchor.device_prefix_len == len(keys):
            return (lock,)
        return lock, self._tree.lock_rows(keys, Space(), len(keys))

    def unlock(self, claim: ClaimKey) -> None:
        """Undo a lock."""
        for lock in self._locks.pop(claim, ()):
            self._tree.unlock(lock)

    def rank(self, claim: ClaimKey, place: ClaimPlace, length: int, priority: int) -> None:
        """Evict a path, split where it ends, after KV of lower priority."""
        keys = place.keys[:length]
        self._tree.find(keys, Space())
        self._ranked[claim] = _Ranked(keys, priority)

    def unrank(self, claim: ClaimKey) -> None:
        """Undo a rank."""
        self._ranked.pop(claim, None)

    def free(self) -> int:
        """Return the number of free slots."""
        return int(self._tree.row_allocator.available_size())

    def evict(self, evict: Evict, params: EvictParams) -> EvictResult:
        """Evict by rank, and by recency within a rank; KV that no claim ranks has rank 0.

        Args:
            evict: SGLang's own eviction.
        """
        if not self._ranked:
            return evict(params)
        with ExitStack() as held:
            ranks = self._by_rank()
            waiting = {
                rank: [self._hold(key, held) for key in keys]
                for rank, keys in ranks.items()
                if rank
            }
            result = evict(params)
            in_reach = list(ranks.get(0, ()))
            self.gave_way(in_reach)
            for rank, let_go in waiting.items():
                missing = not_evicted(params, result)
                if missing is None:
                    self.passed_over([k for r, keys in ranks.items() if r >= rank for k in keys])
                    break
                for release in let_go:
                    release()
                add_evicted(result, evict(missing))
                # A path of this rank may have kept the beginning that one of a lower rank is.
                in_reach += ranks[rank]
                self.gave_way(in_reach)
        return result

    def _by_rank(self) -> dict[int, list[ClaimKey]]:
        """Return claims by priority, the lowest first."""
        found: dict[int, list[ClaimKey]] = {}
        for key in sorted(self._ranked, key=lambda key: self._ranked[key].priority):
            found.setdefault(self._ranked[key].priority, []).append(key)
        return found

    def _hold(self, key: ClaimKey, held: ExitStack) -> Callable[[], None]:
        """Lock a ranked path for a while; returns a function that ends it early."""
        length, node = self._peek(self._ranked[key].keys)
        if not length:
            return lambda: None
        lock = ExitStack()
        lock.callback(self._tree.unlock, self._tree.lock(node))
        held.push(lock)
        return lock.close
