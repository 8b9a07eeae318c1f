"""State per sequence in SGLang's tree: where it is cached, and slots for more of it.

Beside the rows of full attention, which a path's keys find one by one, the tree's nodes hold rows
of layers with a sliding window and, at their ends, recurrent states. Both are evicted by
themselves, so that a path of rows may go on where no request can continue any more.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchResult
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.runtime_context import mamba_cache_chunk_size

from leyline_engine.admit.anchors import Anchors
from leyline_engine.admit.plan import page_floor
from leyline_engine.contract import ProofPlace
from leyline_engine.proof.digests import filled
from leyline_engine.records.publications import Space
from leyline_engine.rows.pool import SplicePool
from leyline_engine.rows.states import STATE, StatePool
from leyline_engine.sglang.rows.pages import free_slots, slots_of_pages, unwritten_slots

ASIDE = (ComponentType.SWA, ComponentType.MAMBA)
"""Parts of a node that hold state."""


@dataclass(slots=True)
class StateSlots:
    """State that is about to become the tree's, with the last of some copied rows."""

    recurrent: torch.Tensor | None
    """int64 ``[1]``; None for a model without recurrent layers."""
    windowed: int
    """How many of the last rows layers with a window have, too."""


class SequenceState:
    """The state of one tree.

    Args:
        cache: SGLang's tree, whose nodes hold state.
        pool: the tree's rows, with those of windows and with states.
    """

    def __init__(self, cache: Any, pool: SplicePool) -> None:
        self._cache = cache
        self._allocator = cache.token_to_kv_pool_allocator
        self._pool = pool
        self.window = int(cache.sliding_window_size or 0) if pool.window is not None else 0
        if pool.states is not None:
            self._keep_free_states_clean(pool.states)

    @property
    def skipped(self) -> tuple[ComponentType, ...]:
        """Parts of nodes that a lock on rows alone leaves out."""
        return tuple(kind for kind in ASIDE if kind in self._cache.tree_components)

    def _keep_free_states_clean(self, states: StatePool) -> None:
        """Overwrite each recurrent state when its slot is freed.

        Slots are few, and a request may hold some for long before it writes to them: those must
        not hold what was forgotten since.
        """
        allocator = self._cache.req_to_token_pool.mamba_allocator
        free, clear = allocator.free, allocator.clear

        def free_clean(slots: torch.Tensor) -> None:
            states.erase(slots.to(torch.int64))
            free(slots)

        def clear_clean() -> None:
            clear()
            states.erase(allocator.free_slots)

        allocator.free, allocator.clear = free_clean, clear_clean
        states.erase(allocator.free_slots)

    # Where state is.

    def anchors(self, node: Any) -> Anchors:
        """Return the anchors on the path to a node, in tokens from the root."""
        path = self._cache.tree_core.collect_path_info([node])[0]
        found = Anchors.everywhere(path[-1].path_end if path else 0)
        if self._pool.states is not None:
            ends = (n.path_end for n in path if self._has(n, ComponentType.MAMBA))
            found = found.common(Anchors.at(ends))
        return found.common(self._windows(path)) if self.window else found

    def _windows(self, path: Sequence[Any]) -> Anchors:
        """Return the positions in front of which a whole window's rows are cached."""
        spans: list[tuple[int, int]] = []
        begin = 0
        for node in path:
            if not self._has(node, ComponentType.SWA):
                begin = node.path_end
                continue
            first = max(node.path_start, begin + self.window if begin else 0)
            if first <= node.path_end:
                spans.append((first, node.path_end))
        return Anchors(_merged(spans))

    def _has(self, node: Any, kind: ComponentType) -> bool:
        return self._cache.tree_core.get_component_device_value(node.node_id, kind) is not None

    def anchor(self, keys: array[int], space: Space, position: int) -> torch.Tensor | None:
        """Return the slot of the recurrent state at a position of a path, int64 ``[1]``.

        Returns:
            Nothing, ``[0]``, for a model without recurrent layers; None if there is none.
        """
        if self._pool.states is None:
            return torch.empty(0, dtype=torch.int64)
        found = self._cache.find(keys, space, position)
        if found.device_prefix_len != position:
            return None
        kind = ComponentType.MAMBA
        value: torch.Tensor | None = self._cache.tree_core.get_component_device_value(
            found.best_match_node, kind
        )
        return None if value is None else value.to(torch.int64)

    def window_cached(self, keys: array[int], space: Space, start: int, end: int) -> bool:
        """Return True if layers with a window have all rows of ``[start, end)`` of a path."""
        if not self.window:
            return True
        page = self._cache.page_size
        start, end = page_floor(start, page), -page_floor(-end, page)
        key = self._cache.tree_keys.key(keys, space, end)
        return not self._cache.tree_core.swa_tombstone_ranges(key, start, end)

    def windowed(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the slots of rows in layers with a window, int64 ``[n]``; 0 where there is none.

        Args:
            slots: int64 ``[n]`` slots of the same rows in the other layers.
        """
        inside: torch.Tensor = self._allocator.full_to_swa_index_mapping[slots]
        return inside.to(torch.int64)

    def branched(self, found: MatchResult, boundary: int) -> MatchResult:
        """Return a match after which a prefill leaves its state in front of a message's start.

        That is where policies cut later. SGLang takes one such place per forward, on the grid of
        its chunks from where the forward starts, and uses it for branches of its own first.
        """
        if self._pool.states is None or found.mamba_branching_seqlen is not None:
            return found
        start, chunk = found.device_prefix_len, mamba_cache_chunk_size()
        place = start + (boundary - start) // chunk * chunk
        return found._replace(mamba_branching_seqlen=place) if place > start else found

    # Slots for more.

    def take(self, slots: torch.Tensor, windowed: int) -> StateSlots | None:
        """Take what the last of some new rows need beside their slots; None if there is no room.

        Args:
            slots: int64 ``[n]``, of :meth:`take_rows`.
            windowed: how many of them layers with a window need, whole pages.
        """
        if windowed and not self._map_window(slots[-windowed:]):
            return None
        if self._pool.states is None:
            return StateSlots(None, windowed)
        allocator = self._cache.req_to_token_pool.mamba_allocator
        state = allocator.alloc(1)
        if state is None:
            self._cache.evict_unheld(EvictParams(num_tokens=0, mamba_num=1))
            state = allocator.alloc(1)
        if state is None:
            self._unmap_window(slots, windowed)
            return None
        return StateSlots(state.to(torch.int64), windowed)

    def _map_window(self, slots: torch.Tensor) -> bool:
        allocator = self._allocator.swa_attn_allocator
        missing = len(slots) - int(allocator.available_size())
        if missing > 0:
            self._cache.evict_unheld(EvictParams(num_tokens=0, swa_num_tokens=missing))
        rows = allocator.alloc(len(slots))
        if rows is None:
            return False
        self._allocator.set_full_to_swa_mapping(slots, rows)
        return True

    def _unmap_window(self, slots: torch.Tensor, windowed: int) -> None:
        if windowed:
            self._allocator.free_swa(slots[-windowed:])

    def give_back(self, slots: torch.Tensor, state: StateSlots | None) -> None:
        """Free what :meth:`take` gave, but for the rows' own slots."""
        if state is None:
            return
        self._unmap_window(slots, state.windowed)
        if state.recurrent is not None:
            self._cache.req_to_token_pool.mamba_allocator.free(state.recurrent)

    def first_windowed(self, begin: int, end: int) -> int:
        """Return the first position from ``begin`` on whose row the window in front of ``end`` has,
        a page's edge; ``end`` for a model without windows."""
        if not self.window:
            return end
        return max(begin, page_floor(end - self.window, self._cache.page_size), 0)

    def put(self, params: InsertParams, state: StateSlots) -> None:
        """Add state to what is about to be inserted."""
        if self.window:
            end = int(params.value.numel())
            params.set_evicted_seqlen(ComponentType.SWA, end - state.windowed)
        params.mamba_value = state.recurrent

    def inserted(self, state: StateSlots, result: Any) -> None:
        """Free a recurrent state that the tree had already."""
        if state.recurrent is not None and result.mamba_exist:
            self._cache.req_to_token_pool.mamba_allocator.free(state.recurrent)

    def keep_end(self, row: Any) -> None:
        """Let a row that computes a gap leave its rows and its state up to its very end.

        Where a cached path branches off, SGLang caches a row only up to there at first. With an
        extra buffer, SGLang keeps the state at the last whole chunk of a forward; the row's
        live slot has the one at its end.
        """
        row.swa_branching_seqlen = None
        if self._pool.states is None or not self._cache.enable_mamba_extra_buffer:
            return
        kv = row.kv
        tracked = kv.mamba_last_track_seqlen is not None
        index = kv.mamba_last_track_idx if tracked else kv.mamba_next_track_idx
        slot = kv.mamba_ping_pong_track_buffer[index].reshape(1).to(torch.int64)
        self._pool.states.copy(kv.mamba_pool_idx.reshape(1).to(torch.int64), slot)
        kv.mamba_last_track_idx, kv.mamba_last_track_seqlen = index, row.end

    def release(self, req: Any) -> None:
        """Free the state of a request that was matched, but isn't admitted: others need the slot.

        It has no slots of an extra buffer yet.
        """
        kv = req.kv
        if self._pool.states is None or kv.holds_kv or not kv.holds_mamba:
            return
        self._cache.req_to_token_pool.mamba_allocator.free(kv.mamba_pool_idx.reshape(1))
        kv.mamba_pool_idx, kv.mamba_cow_src_index, kv.mamba_needs_clear = None, None, False

    def scrub(self) -> None:
        """Overwrite the rows that layers with a window hold of what is gone."""
        if self._pool.window is not None:
            self._pool.window.erase_used(self._free_windowed())

    def _free_windowed(self) -> torch.Tensor:
        allocator, page = self._allocator.swa_attn_allocator, self._cache.page_size
        free = [free_slots(allocator)]
        # A batch's frees are delayed until all of them are known.
        free += [slots[slots > 0].to(torch.int64) for slots in self._allocator.swa_free_group]
        free += [slots_of_pages(pages, page) for pages in self._allocator.swa_page_ids_group]
        rows = self._cache.req_to_token_pool.req_to_token
        for rest in unwritten_slots(tuple(self._cache.requests), rows, page):
            # The rest of a request's last page, after the row of its last token.
            last = self.windowed(rest[:1] - 1)
            after = last + 1 + torch.arange(len(rest), device=last.device)
            free.append(after[(last > 0).expand(len(rest))])
        return torch.cat(free)

    def free_places(self) -> list[ProofPlace]:
        """Return what free slots hold of states and of windows: each that isn't empty survives."""
        found = []
        if self._pool.window is not None:
            free = self._free_windowed().cpu().numpy()
            left = filled(self._pool.window.every_tensor, free)
            found.append(ProofPlace(place="window", scanned=len(free), survivors=len(left)))
        if self._pool.states is not None:
            slots = self._cache.req_to_token_pool.mamba_allocator.free_slots.cpu().numpy()
            left = filled([t.transpose(0, 1) for t in self._pool.states.tensors], slots)
            found.append(ProofPlace(place=STATE, scanned=len(slots), survivors=len(left)))
        return found


def _merged(spans: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return ascending spans of positions, those joined that touch."""
    found: list[tuple[int, int]] = []
    for first, last in spans:
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    return tuple(found)
