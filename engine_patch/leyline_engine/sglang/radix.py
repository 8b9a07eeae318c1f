"""The radix back end ``leyline``: SGLang's unified cache, whose keys include lineages.

The tree itself is SGLang's, Rust core included. Requests with an envelope match, insert and
checkpoint under keys that fold in their lineage map; what a forget condemned is not matched by
anyone. Everything else is as in stock SGLang.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np
import torch
from sglang.srt.disaggregation.kv_events import BlockStored
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    CacheRequestOutcome,
    EvictParams,
    EvictResult,
    InsertParams,
    MatchPrefixParams,
    MatchResult,
    TreeLock,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.cache_action import FreeDeviceKV, FreeDeviceKVFullOnly
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from leyline_engine.admit.plan import page_floor
from leyline_engine.contract import PRIVATE_ID
from leyline_engine.records.lineage import MAX_TOKEN, TOKEN_BITS, first_spliced
from leyline_engine.records.publications import Publication, Space
from leyline_engine.reuse.index import ReuseIndex
from leyline_engine.rows.pool import SplicePool
from leyline_engine.scheduler.containment import contained
from leyline_engine.sglang.census import Census
from leyline_engine.sglang.condemned import CondemnedPaths, Unpublished
from leyline_engine.sglang.rows.pages import free_slots, unwritten_slots, whole_pages
from leyline_engine.sglang.sequence_state import SequenceState, StateSlots
from leyline_engine.sglang.shelf import RadixShelf, add_evicted, not_evicted
from leyline_engine.sglang.stage_row import StageRow
from leyline_engine.sglang.tree_keys import TreeKeys, limited
from leyline_engine.sglang.turn import Turn

_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


class LineageStored(BlockStored, tag="BlockStored"):  # type: ignore[call-arg]
    """SGLang's event with one more member; readers that don't know it ignore it."""

    lineage: str | None = None
    """Mark of the lineage of the last token; it means nothing outside of this engine's run.
    None for a block that anybody may find."""


class AnnouncesLineages:
    """A tree whose events show routers whose the blocks are; a base of SGLang's tree."""

    def take_events(self) -> list[Any]:
        """Return what has changed since the last call, for the publisher."""
        taken: list[Any] = super().take_events()  # type: ignore[misc]
        return announced(taken)


def announced(events: Iterable[Any]) -> list[Any]:
    """Return events as routers get them: blocks with folded keys under private ids."""
    return [_announced(event) if isinstance(event, BlockStored) else event for event in events]


def _announced(event: BlockStored) -> BlockStored:
    keys = _flat(event.token_ids)
    last = max(keys, default=0)
    if last <= MAX_TOKEN:
        return event
    ids = private_ids(keys)
    tokens: list[Any] = ids
    if len(ids) != len(event.token_ids):  # pairs, of speculative decoding
        tokens = list(zip(ids[::2], ids[1::2], strict=True))
    return LineageStored(
        block_hashes=event.block_hashes,
        parent_block_hash=event.parent_block_hash,
        token_ids=tokens,
        block_size=event.block_size,
        lora_id=event.lora_id,
        medium=event.medium,
        cache_salt=event.cache_salt,
        session_id=event.session_id,
        lora_name=event.lora_name,
        lineage=f"{keys[-1] >> TOKEN_BITS or last >> TOKEN_BITS:010x}",
    )


def private_ids(keys: Sequence[int]) -> list[int]:
    """Return keys with each folded one as a private id; token ids stay as they are."""
    plain = np.array(keys, dtype=np.int64)
    mixed = plain.view(np.uint64).copy()
    with np.errstate(over="ignore"):
        for multiplier, shift in zip(_MULTIPLIERS, (30, 27), strict=True):
            mixed ^= mixed >> np.uint64(shift)
            mixed *= np.uint64(multiplier)
        mixed ^= mixed >> np.uint64(31)
    private = (mixed.view(np.int64) & (PRIVATE_ID - 1)) | PRIVATE_ID
    found: list[int] = np.where(plain > MAX_TOKEN, private, plain).tolist()
    return found


def _flat(tokens: Sequence[Any]) -> list[int]:
    if tokens and isinstance(tokens[0], tuple | list):
        return [key for pair in tokens for key in pair]
    return list(tokens)


class Listener(Protocol):
    """Decides on behalf of requests with envelopes; see :mod:`.engine`."""

    def turn_of(self, req: Any) -> Turn | None:
        """Return the state of a request that brought an envelope."""

    def match(self, turn: Turn, params: MatchPrefixParams) -> MatchResult:
        """Return a turn's longest cached prefix, under the maps under which it may be cached."""

    def publishes(self, turn: Turn | None, req: Any, length: int) -> bool:
        """Prepare for a request's first ``length`` tokens to become matchable, if they may."""

    def checkpointed(self, req: Any) -> None:
        """Record that a request's KV is in the tree, up to the node that it holds locked."""

    def released(self, req: Any) -> None:
        """Record that a request gave back its slots and its lock."""

    def dropped(self, rid: str) -> None:
        """Record that a waiting request will not run."""

    def withholds(self, kv: Any) -> bool:
        """Return True if the slots of a KV record must be overwritten."""

    def flushing(self) -> None:
        """Prepare for the tree's flush."""

    def flushed(self) -> None:
        """Record that the tree is empty."""

    def removing(self, keys: array[int], start: int, cause: str) -> None:
        """Record that the cached part of a path after ``start`` is about to go, for any claims."""

    def give_way(self) -> bool:
        """Free the memory that waiting requests hold; returns False if they held nothing."""

    def evicted(self, tokens: int) -> None:
        """Record that ``tokens`` were evicted to make room."""


class LeylineRadixCache(AnnouncesLineages, UnifiedRadixCache):
    """SGLang's unified radix cache with lineage keys and targeted removal."""

    def __init__(self, params: Any) -> None:
        self.leyline: Listener | None = None
        self._pool: SplicePool | None = None
        self.condemned = CondemnedPaths(TreeKeys())  # cleared while the tree is made
        self._folding: Turn | None = None
        self.state: SequenceState | None = None
        """State that the model keeps per sequence; None if it keeps none."""
        self.shelf: RadixShelf | None = None
        """Paths that claims rank; consulted in evictions."""
        self._census: Census | None = None
        self._index: ReuseIndex | None = None
        self.speculative = ""
        """SGLang's algorithm of speculative decoding."""
        self.empty_corpus: Callable[[], None] | None = None
        """Empties the corpus from which NGRAM drafts."""
        # SGLang may drop a request without notice.
        self.requests: WeakSet[Any] = WeakSet()
        super().__init__(params)
        self.tree_keys = TreeKeys(int(self.page_size), int(self.tree_core.is_eagle))
        self.condemned = CondemnedPaths(self.tree_keys)

    # Calls from SGLang.

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        if params.req is not None:
            self.requests.add(params.req)
        turn = self._turn(params.req)
        if turn is not None and self.leyline is not None:
            return self._with_state(params, turn, self.leyline.match(turn, params))
        if self.condemned:
            allowed = self.allowed_length(params.key.raw_token_ids())
            params = replace(params, key=limited(params.key, allowed))
        return super().match_prefix(params)

    def _with_state(self, params: MatchPrefixParams, turn: Turn, found: MatchResult) -> MatchResult:
        """Return a match for which a request has the recurrent state at its end, if it wants it."""
        if self.state is not None and turn.spans:
            found = self.state.branched(found, turn.spans[-1].start)
        for component in self._components_tuple if params.cow_mamba else ():
            found = component.finalize_match_result_in_cache(params, found)
        return found

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        turn = self._turn(req)
        listener = self.leyline
        if listener is not None and not listener.publishes(turn, req, up_to):
            for component in self._components_tuple if req.finished() else ():
                component.cleanup_after_caching_req(req, is_finished=True)  # frees its state
            return
        if self.state is not None and isinstance(req, StageRow) and up_to == req.end:
            self.state.keep_end(req)
        self._folding = turn
        try:
            super().checkpoint(req, up_to=up_to, **kwargs)
        finally:
            self._folding = None
        if self.leyline is not None:
            self.leyline.checkpointed(req)

    def insert(self, params: InsertParams) -> Any:
        turn = self._folding
        if turn is not None:
            params = replace(params, key=self._folded(params.key, turn))
        result = super().insert(params)
        if turn is not None and turn.lineage:
            self._published(params.value, turn, result)
        return result

    def evict(self, params: EvictParams) -> EvictResult:
        return self._evict_also_held(super().evict, params)

    def evict_for_alloc(self, params: EvictParams, **kwargs: Any) -> EvictResult:
        return self._evict_also_held(partial(super().evict_for_alloc, **kwargs), params)

    def _evict_also_held(
        self, evict: Callable[[EvictParams], EvictResult], params: EvictParams
    ) -> EvictResult:
        """Evict; if that isn't enough, also the KV that waiting turns held until now."""
        result = self._evict_ranked(evict, params)
        missing = not_evicted(params, result)
        if missing is not None and self.leyline is not None and self.leyline.give_way():
            add_evicted(result, self._evict_ranked(evict, missing))
        return result

    def evict_unheld(self, params: EvictParams) -> None:
        """Evict what no waiting turn holds."""
        self._evict_ranked(super().evict, params)

    def _evict_ranked(
        self, evict: Callable[[EvictParams], EvictResult], params: EvictParams
    ) -> EvictResult:
        """Evict what claims rank last, and notify them."""
        result = evict(params) if self.shelf is None else self.shelf.evict(evict, params)
        if self.leyline is not None and result.num_tokens_evicted:
            self.leyline.evicted(result.num_tokens_evicted)
        return result

    def _drain_device_frees(self, device_frees: dict[ComponentType, list[torch.Tensor]]) -> None:
        self._note_freed(device_frees.get(ComponentType.FULL, []))
        super()._drain_device_frees(device_frees)

    def _apply_cache_action(self, action: Any) -> None:
        if isinstance(action, FreeDeviceKV | FreeDeviceKVFullOnly):
            # Rows that had lost their windows give way to such with them.
            self._note_freed(list(action.indices))
        super()._apply_cache_action(action)

    def _note_freed(self, slots: list[torch.Tensor]) -> None:
        with contained("noting what is freed"):
            if self._census is not None:
                self._census.freeing(slots)
            if self._pool is not None:
                self._pool.freed(slots)
            if self._index and slots:
                self._index.freed(torch.cat(slots).cpu().numpy())

    def free_kv_row(self, kv: Any, ranges: list[tuple[int, int]]) -> None:
        withheld = self.leyline is not None and self.leyline.withholds(kv)
        if withheld:
            row = self.req_to_token_pool.req_to_token[kv.req_pool_idx]
            with contained("overwriting what a forget withheld"):
                for start, end in ranges:
                    # What is freed are pages: the request may have written after the range's end.
                    self.overwrite(whole_pages(row[start:end], self.page_size))
        super().free_kv_row(kv, ranges)
        if withheld and self.state is not None:
            with contained("overwriting windows that a forget withheld"):
                self.state.scrub()  # those that the request has left, too

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        super().on_release(req, checkpointed=checkpointed)
        if self.leyline is not None:
            self.leyline.released(req)

    def finish(self, handle: CacheRequestHandle, outcome: CacheRequestOutcome) -> None:
        super().finish(handle, outcome)
        if self.leyline is not None and outcome is not CacheRequestOutcome.SUCCESS:
            self.leyline.dropped(handle.rid)

    def reset(self) -> None:
        if self.leyline is not None:
            self.leyline.flushing()
        super().reset()
        self.condemned.clear()
        if self._index is not None:
            self._index.clear()
        if self._census is not None:
            self._census.cleared()
        if self._pool is not None:
            self._pool.emptied()
        if self.leyline is not None:
            self.leyline.flushed()

    # Calls from Leyline.

    def attach(
        self,
        listener: Listener,
        pool: SplicePool | None,
        shelf: RadixShelf | None = None,
        census: Census | None = None,
        index: ReuseIndex | None = None,
    ) -> None:
        """Report to a listener from now on.

        Args:
            listener: decides on behalf of requests with envelopes.
            pool: the rows of the tree's slots; None if they can't be touched.
            shelf: paths that claims rank.
            census: counts the slots that the tree has after a splice.
            index: learns which slots the tree frees.
        """
        self.leyline, self._pool, self.shelf = listener, pool, shelf
        self._census, self._index = census, index
        if pool is not None and (pool.window is not None or pool.states is not None):
            self.state = SequenceState(self, pool)

    def _turn(self, req: Any) -> Turn | None:
        return None if self.leyline is None or req is None else self.leyline.turn_of(req)

    def allowed_length(self, keys: array[int]) -> int:
        """Return the number of leading keys that may be matched: nothing condemned."""
        return self.condemned.allowed_length(keys) if self.condemned else len(keys)

    def _folded(self, key: RadixKey, turn: Turn) -> RadixKey:
        """Return the key with a turn's lineages folded in."""
        if not turn.lineage:
            return key
        tokens = self.tree_keys.shifted(turn.keys(key.raw_token_ids()))
        return RadixKey(tokens, key.extra_key, key.is_bigram, cache_salt=key.cache_salt)

    def is_condemned(self, keys: array[int]) -> bool:
        """Return True if KV under these keys waits to be removed."""
        return self.allowed_length(keys) < len(keys)

    def find(self, keys: array[int], space: Space, limit: int | None = None) -> MatchResult:
        """Return the longest cached prefix of ``keys[:limit]``, nothing condemned.

        Args:
            keys: radix keys, lineages folded in.
            space: the namespace of the keys.
            limit: maximum number of keys.
        """
        key = self.tree_keys.key(keys, space, limit)
        if self.condemned:
            key = limited(key, self.allowed_length(keys))
        return super().match_prefix(MatchPrefixParams(key=key))

    def slot_count(self, path: Publication, limit: int | None = None) -> int:
        """Return the number of slots of a path's cached beginning, condemned or not."""
        key = self.tree_keys.key(path.keys, path.space, limit)
        return int(self.tree_core.match_full_device_prefix(key)[0])

    def readable(self, slots: torch.Tensor) -> int:
        """Return the number of leading slots, of a path, whose rows may be copied by now."""
        return len(slots)

    def peek(self, keys: array[int], space: Space) -> Any:
        """Return the slots, int64 ``[n]``, that a request could match; nothing is touched."""
        return self.slots_of(Publication(keys, space=space), self.allowed_length(keys))

    def slots_of(self, path: Publication, limit: int | None = None) -> Any:
        """Return the slots, int64 ``[n]``, of a path's cached beginning, condemned or not."""
        key = self.tree_keys.key(path.keys, path.space, limit)
        length, node, _ = self.tree_core.match_full_device_prefix(key)
        return self.path_device_indices(node)[: int(length)]

    def touch_turn(self, turn: Turn) -> None:
        """Refresh the cached prefix of a waiting turn, so that it is evicted last."""
        self.find(turn.keys(turn.req.origin_input_ids), turn.space)

    def in_pages(self, tokens: int) -> int:
        """Return the slots that tokens take."""
        return int(-(-tokens // self.page_size) * self.page_size)

    @property
    def row_allocator(self) -> Any:
        """SGLang's allocator of the slots that keys find: of two, that of the unwindowed layers."""
        allocator = self.token_to_kv_pool_allocator
        return getattr(allocator, "full_attn_allocator", allocator)

    def take(self, count: int) -> torch.Tensor | None:
        """Take ``count`` free slots (int64), after evictions if need be; None if too few."""
        missing = count - int(self.row_allocator.available_size())
        if missing > 0:
            self.evict_unheld(EvictParams(num_tokens=missing))
        slots: torch.Tensor | None = self.row_allocator.alloc(count)
        return slots

    def give_back(self, slots: torch.Tensor) -> None:
        """Free slots that :meth:`take` gave and that aren't in the tree."""
        self.row_allocator.free(slots)

    def rows_cached(self, keys: array[int], space: Space, limit: int) -> int:
        """Return how many of ``keys[:limit]`` have rows, at an anchor or not; none condemned."""
        limit = min(limit, self.allowed_length(keys))
        return int(
            self.tree_core.match_full_device_prefix(self.tree_keys.key(keys, space, limit))[0]
        )

    def lock_rows(self, keys: array[int], space: Space, length: int) -> TreeLock:
        """Lock the rows of a path's first ``length`` slots, which may end at no anchor."""
        key = self.tree_keys.key(keys, space, length)
        super().match_prefix(MatchPrefixParams(key=key))  # splits the node that they end in
        node = self.tree_core.match_full_device_prefix(key)[1]
        return self.lock(node, self.state.skipped if self.state is not None else ())

    def graft(
        self,
        keys: array[int],
        node: Any,
        slots: torch.Tensor,
        turn: Turn,
        state: StateSlots | None = None,
    ) -> Any:
        """Make ``slots`` the KV of the keys after a locked node.

        Args:
            keys: all keys from the root on, those that find the last slot included.
            node: the node at which their cached part ends.
            slots: int64 ``[n]`` for the last n places; they become the tree's.
            turn: the turn of the keys.
            state: what else becomes the tree's, where the model keeps state per sequence.

        Returns:
            The node at which the keys end.
        """
        prefix = self.path_device_indices(node)
        length = len(keys) - self.tree_keys.lookahead - int(slots.numel())
        params = InsertParams(
            key=self.tree_keys.key(keys, turn.space),
            value=torch.cat([prefix[:length], slots]),
            prev_prefix_len=length,
            inserted_len=length,
            priority=turn.req.priority or 0,
        )
        if state is not None and self.state is not None:
            self.state.put(params, state)
        result = super().insert(params)
        if state is not None and self.state is not None:
            self.state.inserted(state, result)
        self._published(params.value, turn, result)
        return result.last_device_node

    def _published(self, slots: torch.Tensor, turn: Turn, result: Any) -> None:
        """Record that the tree took a path's slots, but for the first, which it had."""
        if self._census is not None:
            with contained("counting what was published"):
                known = result.prefix_len
                if self.state is not None and self.state.window:
                    slots, known = self.path_device_indices(result.last_device_node), 0
                exact = first_spliced(turn.lineage, len(slots))
                self._census.published(slots[known:], exact - known)

    def unpublish(self, path: Publication, start: int, cause: str = "unpublished") -> Unpublished:
        """Remove the cached part of a path from ``start``'s page on, and overwrite it."""
        start = page_floor(start, self.page_size)
        key = self.tree_keys.key(path.keys, path.space)
        self.announce(path, start, cause)
        if start:
            split = limited(key, self.tree_keys.keys_of(start))
            super().match_prefix(MatchPrefixParams(key=split))
        removed: list[torch.Tensor] = []
        try:
            left = self._remove_leaves(key, start, removed)
        finally:
            if removed:
                self.overwrite(torch.cat(removed))
        return replace(left, erased=left.erased + sum(int(slots.numel()) for slots in removed))

    def announce(self, path: Publication, start: int, cause: str) -> None:
        """Announce that the cached part of a path is about to go, or to become unmatchable."""
        # Claims are on requests that name no namespace.
        if self.leyline is not None and path.space == Space():
            self.leyline.removing(path.keys, start, cause)

    def _remove_leaves(self, key: RadixKey, start: int, removed: list[torch.Tensor]) -> Unpublished:
        """Free a path's nodes after ``start`` from its end on, as far as possible."""
        while True:
            super().match_prefix(MatchPrefixParams(key=key))  # splits the node that it ends in
            # Rows may go on where no request can continue.
            length, node, _ = self.tree_core.match_full_device_prefix(key)
            left = int(length) - start
            if left <= 0:
                return Unpublished()
            if self._is_locked(node):
                return Unpublished(held=left)
            leaf = self.tree_core.collect_path_info([node])[0][-1]
            if leaf.num_children:
                return Unpublished(shared=left)
            slots = self.path_device_indices(node)[leaf.path_start : leaf.path_end].clone()
            self._apply_eviction_result(self.tree_core.evict_device_leaf(node, False))
            removed.append(slots)

    def _is_locked(self, node: Any) -> bool:
        """Return True if a request holds a node: then a further lock protects nothing new."""
        receipt = self.inc_lock_ref(node)
        self.dec_lock_ref(node, receipt.to_dec_params())
        return not receipt.delta

    def overwrite(self, slots: torch.Tensor) -> None:
        """Overwrite slots' contents."""
        if self._pool is not None and slots.numel():
            self._pool.erase(slots)

    def scrub(self) -> None:
        """Overwrite what slots hold of evicted, aborted or duplicate KV, and empty a corpus."""
        if self.empty_corpus is not None:
            self.empty_corpus()
        if self._pool is not None:
            self._pool.erase_used(self.idle_slots())
        if self.state is not None:
            self.state.scrub()

    def idle_slots(self) -> torch.Tensor:
        """Return slots, int64, without a token: free ones, and the rest of requests' last pages."""
        rows = self.req_to_token_pool.req_to_token
        unwritten = unwritten_slots(tuple(self.requests), rows, self.page_size)
        return torch.cat([free_slots(self.row_allocator), *unwritten])
