"""Records of what a request of the litmus suite does to SGLang's pool, page by page.

SGLang doesn't report the pages it takes and frees; so the free ones are counted before every other
event, and the difference is an event. One request runs at a time.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from leyline_engine.claims.events import Allocated, Evicted, Freed, Run
from leyline_engine.claims.keeper import ArrivingRequest, ClaimKeeper
from leyline_engine.claims.protection import ClaimKey
from leyline_engine.claims.runs import count, joined
from leyline_engine.sglang.radix import LeylineRadixCache
from leyline_engine.sglang.shelf import RadixShelf
from leyline_engine.sglang.stage_row import StageRow
from leyline_engine.sglang.turn import Turn
from leyline_lab.claims.watching import record_arrival, record_retained


class Watch:
    """Watches one tree for one case.

    Args:
        tree: SGLang's; this watch replaces an earlier one.
        keeper: its ledger takes the events, and it names the pages.
        shelf: finds the slots of a path.
    """

    def __init__(self, tree: Any, keeper: ClaimKeeper, shelf: RadixShelf) -> None:
        self._tree = tree
        self._shelf = shelf
        self._keeper = keeper
        self._page = keeper.book.arithmetic.page_size
        self._free = self._now_free()
        self._request = ""
        self._evicted: list[Run] = []
        self._going = 0
        """Pages that the request's end gives back, maybe only when the step is over."""
        self._tree.checkpoint = self._checkpoint
        self._tree.graft = self._graft
        self._tree.on_release = self._release
        self._tree.free_kv_row = self._free_row
        self._tree._evict_device_leaf = self._evict_leaf
        shelf.gave_way = self._gave_way

    def _now_free(self) -> int:
        return int(self._tree.token_to_kv_pool_allocator.available_size()) // self._page

    def begins(self, req: Any, matched: Sequence[int]) -> None:
        """Record that a request waits, and nothing else runs.

        Args:
            matched: slots of its cached prefix.
        """
        self._request = req.rid
        payload = req.leyline.payload
        request = ArrivingRequest(
            name=req.rid,
            tenant=payload.scope,
            session=payload.session,
            source=payload.turn,
            prompt_tokens=len(req.origin_input_ids),
            max_new_tokens=req.sampling_params.max_new_tokens,
        )
        record_arrival(self._keeper, request, matched, admits=not req.leyline.private)

    def caught_up(self) -> None:
        """Count pages freed since then as recorded: they were an event already."""
        self._free = self._now_free()

    def _count(self) -> None:
        """Record the pages that were taken or given back since the last event."""
        self._tell_evicted()
        change, self._free = self._now_free() - self._free, self._now_free()
        ledger, request = self._keeper.ledger, self._request
        if change < 0:
            ledger.append(Allocated(request=request, pages=-change, free=self._free))
        elif change > 0:
            ledger.append(Freed(request=request, pages=change, free=self._free, ended=False))

    def _evict_leaf(self, node: Any, tracker: Any) -> Any:
        if not self._evicted:
            self._count()
        leaf = self._tree.tree_core.collect_path_info([node])[0][-1]
        path = self._tree.path_device_indices(node)
        runs = self._keeper.names.known(path[leaf.path_start : leaf.path_end].tolist())
        result = LeylineRadixCache._evict_device_leaf(self._tree, node, tracker)
        self._evicted.extend(runs)
        self._keeper.names.forget(runs)
        return result

    def _tell_evicted(self) -> None:
        """Record leaves that were evicted in succession as one eviction."""
        if self._evicted:
            self._free += count(self._evicted)
            runs = joined(sorted(self._evicted))
            self._evicted.clear()
            self._keeper.ledger.append(Evicted(request=self._request, runs=runs, free=self._free))

    def _gave_way(self, keys: Sequence[ClaimKey]) -> None:
        self._tell_evicted()
        self._keeper.gave_way(keys)

    def _free_row(self, kv: Any, ranges: list[tuple[int, int]]) -> None:
        self._count()
        page = self._page
        self._going += sum(-(-end // page) - start // page for start, end in ranges)
        LeylineRadixCache.free_kv_row(self._tree, kv, ranges)

    def _checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        self._count()
        LeylineRadixCache.checkpoint(self._tree, req, up_to=up_to, **kwargs)
        turn = req.leyline
        tokens = (req.origin_input_ids + req.output_ids)[:up_to]
        if not turn.private:
            self._retained(turn, turn.keys(tokens))

    def _graft(self, keys: array[int], node: Any, slots: Any, turn: Turn) -> Any:
        self._count()
        end = LeylineRadixCache.graft(self._tree, keys, node, slots, turn)
        self._retained(turn, keys)
        return end

    def _retained(self, turn: Turn, keys: array[int]) -> None:
        """Record tokens that became matchable, and the names of the path to their end."""
        assert turn.payload is not None
        slots = self._shelf.cached(keys)
        record_retained(self._keeper, self._request, turn.payload.turn, slots, self._free)

    def _release(self, req: Any, *, checkpointed: bool) -> None:
        pages, self._going = self._going, 0
        self._free += pages
        ended = not isinstance(req, StageRow)
        if pages or ended:
            freed = Freed(request=self._request, pages=pages, free=self._free, ended=ended)
            self._keeper.ledger.append(freed)
        LeylineRadixCache.on_release(self._tree, req, checkpointed=checkpointed)
