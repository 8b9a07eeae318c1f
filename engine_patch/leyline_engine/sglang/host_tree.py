"""The radix back end above a pool in the host's memory (HiCache, its first two tiers).

SGLang copies nodes of its tree to the host, evicts them from the device, and loads them back when a
request matches them. A node's copy lives under the node's own keys, so lineages and condemned paths
hold for it, too. What is added here: a removal reaches copies, what the host freed is overwritten,
and a splice reads no slot that is still being loaded.

The tree runs on SGLang's own core in Python: the Rust core can't remove a given copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, EvictResult, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import DriveHostEvictionResult
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from leyline_engine.proof.witness import Slots
from leyline_engine.records.lineage import exact_length
from leyline_engine.records.publications import Publication
from leyline_engine.rows.host import CopiedRows
from leyline_engine.scheduler.containment import contained
from leyline_engine.sglang.condemned import Unpublished
from leyline_engine.sglang.radix import LeylineRadixCache
from leyline_engine.sglang.turn import Turn

CORE = "python"
"""SGLang's core that this tree needs."""
NO_STORAGE = "Leyline's forgets can't reach a storage back end: start without Leyline to attach one"


class HostedRadixCache(LeylineRadixCache):
    """A tree whose nodes may have copies in the host's memory, or be there alone."""

    def __init__(self, params: Any) -> None:
        self._host: CopiedRows | None = None
        self._loading = False
        self._moved = False
        """True if copies to the host, or back, are done since this was looked at."""
        self._settle: Callable[[], None] = lambda: None
        super().__init__(params)

    # Calls from SGLang.

    def check_hicache_events(self) -> None:
        super().check_hicache_events()
        moved, self._moved = self._moved, False
        if moved and self.condemned:
            # They held what a forget waits for.
            with contained("removing what was condemned"):
                self._settle()

    def _finish_write_through_ack(self, ack_id: int) -> None:
        super()._finish_write_through_ack(ack_id)
        self._moved = True

    def loading_check(self, finish_count: int | None = None) -> None:
        before = len(self.ongoing_load_back)
        super().loading_check(finish_count)
        self._moved |= len(self.ongoing_load_back) < before

    def load_back(self, node_id: int, mem_quota: int | None = None, req: Any = None) -> bool:
        node, nodes = self.tree_core.node_by_id(node_id), []
        while node.evicted:
            nodes.append(node)
            node = node.parent
        self._loading = True
        try:
            loaded = bool(super().load_back(node_id, mem_quota, req))
        finally:
            self._loading = False
        for each in nodes if loaded else ():
            self._loaded(each)
        return loaded

    def attach_storage_backend(self, *args: Any, **options: Any) -> tuple[bool, str]:
        if self._host is None:
            # Nothing is spliced, and no forget is reported as done.
            done, message = super().attach_storage_backend(*args, **options)
            return bool(done), str(message)
        return False, NO_STORAGE

    def reset(self) -> None:
        if self._host is not None:
            self._host.emptied()
        super().reset()

    def _drain_host_frees(self, host_frees: dict[ComponentType, list[torch.Tensor]]) -> None:
        if self._host is not None:
            self._host.freed(_joined(host_frees.get(ComponentType.FULL, ())))
        super()._drain_host_frees(host_frees)

    def _evict_also_held(
        self, evict: Callable[[EvictParams], EvictResult], params: EvictParams
    ) -> EvictResult:
        if self._loading:
            # A turn that is being admitted must keep what it holds.
            return self._evict_ranked(evict, params)
        return super()._evict_also_held(evict, params)

    # Calls from Leyline.

    def attach(self, listener: Any, pool: Any, *rest: Any, **options: Any) -> None:
        super().attach(listener, pool, *rest, **options)
        self._host = None if pool is None else pool.host
        self._settle = listener.forgets.settle
        if self._host is not None:
            self._host.erased = pool.erased

    def slot_count(self, path: Publication, limit: int | None = None) -> int:
        """Return the number of a path's slots with those that only the host has; within a limit, of
        those that the device has, from which a splice may copy."""
        if limit is not None:
            return super().slot_count(path, limit)
        return sum(len(node.key) - over for node, over in self._nodes_along(path))

    def readable(self, slots: torch.Tensor) -> int:
        controller = self.cache_controller
        queue = controller.load_queue if controller is not None else ()
        coming = _joined([move.device_indices for move in queue]).to(slots.device)
        late = torch.nonzero(torch.isin(slots, coming)).flatten() if len(coming) else coming
        return int(late[0]) if len(late) else len(slots)

    def peek(self, keys: Any, space: Any) -> Any:
        slots = super().peek(keys, space)
        return slots[: self.readable(slots)]

    def _published(self, slots: torch.Tensor, turn: Turn, result: Any) -> None:
        # Of the keys that the tree had, some had no slots on the device.
        path = self.path_device_indices(result.last_device_node)
        super()._published(path, turn, replace(result, prefix_len=0))

    def scrub(self) -> None:
        super().scrub()
        if self._host is None:
            return
        if self._host.is_stale(self._written()):
            # They will overwrite what was freed there, perhaps what is being forgotten.
            self.writing_check(write_back=True)
        self._host.scrub()

    def copies_of(self, path: Publication, *, alone: bool) -> tuple[Slots, Slots]:
        """Return the places of a path's slots that have a copy, and the copies' slots.

        Args:
            alone: True for slots that the device has no more.

        Returns:
            Two int64 ``[n]``.
        """
        places, found, at = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)], 0
        for node, over in self._nodes_along(path):
            length = len(node.key) - over
            copy = node.component_data[ComponentType.FULL].host_value
            if copy is not None and (node.evicted or not alone):
                places.append(np.arange(at, at + length))
                found.append(copy[:length].cpu().numpy())
            at += length
        return np.concatenate(places), np.concatenate(found)

    # The tree.

    def _remove_leaves(self, key: RadixKey, start: int, removed: list[torch.Tensor]) -> Unpublished:
        """Free a path's nodes after ``start`` on the device and on the host, from its end on."""
        copies: list[torch.Tensor] = []
        alone = 0
        try:
            while True:
                match = UnifiedRadixCache.match_prefix(self, MatchPrefixParams(key=key))
                left = match.device_prefix_len + match.host_hit_length - start
                if left <= 0:
                    return Unpublished(erased=alone)
                node = self.tree_core.node_by_id(match.best_match_node)
                if _is_held(node):
                    return Unpublished(erased=alone, held=left)
                if node.children:
                    return Unpublished(erased=alone, shared=left)
                data = node.component_data[ComponentType.FULL]
                if data.host_value is not None:
                    copies.append(data.host_value.clone())
                alone += len(node.key) if data.value is None else 0
                if data.value is not None:
                    slots = data.value.clone()
                    self._apply_eviction_result(self.tree_core.evict_device_leaf(node.id, False))
                    removed.append(slots)
                if data.host_value is not None:
                    self._evict_copy(node)
        finally:
            if copies and self._host is not None:
                self._host.erase(torch.cat(copies))

    def _evict_copy(self, node: Any) -> None:
        """Remove a node that only the host has, and that has no children."""
        result = DriveHostEvictionResult()
        try:
            self.tree_core._evict_host_leaf(
                node,
                result.tracker,
                result.device_frees,
                result.host_frees,
                cache_actions=result.cache_actions,
            )
        finally:
            self._apply_eviction_result(result)

    def _nodes_along(self, path: Publication) -> Iterator[tuple[Any, int]]:
        """Yield the nodes of a path's cached beginning, each with its keys beyond the path's end.

        Nothing is split or touched.
        """
        core, page = self.tree_core, self.page_size
        key, _ = self.tree_keys.key(path.keys, path.space).maybe_to_bigram_view(core.is_eagle)
        key = key.page_aligned(page)
        node, at = core.root_node, 0
        while at < len(key):
            node = node.children.get(key.child_key_at(at, page))
            if node is None or (node.evicted and not node.backuped):
                return
            shared = node.key.match_at(key, at, page_size=page)
            yield node, len(node.key) - shared
            at += shared
            if shared < len(node.key):
                return

    def _written(self) -> torch.Tensor:
        """Return the host slots that copies under way write to."""
        moves = self.ongoing_write_through.values()
        nodes = [
            self.tree_core.node_by_id(node) for move in moves for node in move.publish_node_ids
        ]
        return _joined([node.component_data[ComponentType.FULL].host_value for node in nodes])

    def _loaded(self, node: Any) -> None:
        """Record that a node has slots on the device again; what stood there says nothing."""
        slots = node.component_data[ComponentType.FULL].value
        if self._pool is not None:
            self._pool.loaded(slots)
        if self._census is not None:
            with contained("counting what was loaded back"):
                self._census.published(slots, exact_length(node.key.raw_token_ids()))


def tree_class(context: Any) -> type[LeylineRadixCache]:
    """Return the class of a scheduler's tree, and choose its core.

    Args:
        context: SGLang's ``TreeCacheBuildContext``.
    """
    if not context.enable_hierarchical_cache:
        return LeylineRadixCache
    context.params.tree_core_backend = CORE
    return HostedRadixCache


def _is_held(node: Any) -> bool:
    """Return True if a request holds a node, or it is being copied."""
    moving = node.write_through_pending_id is not None or node.load_back_pending_id is not None
    return moving or any(data.lock_ref or data.host_lock_ref for data in node.component_data)


def _joined(slots: Any) -> torch.Tensor:
    parts = [each for each in slots if each is not None]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
