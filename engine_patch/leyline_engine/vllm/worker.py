"""The rows of one vLLM worker: the scheduler's orders, carried out on its KV cache."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np
import torch

from leyline_engine.rows.blocks import pool_of_views
from leyline_engine.rows.origins import origin_bytes_from, origin_rows
from leyline_engine.rows.pool import SplicePool
from leyline_engine.vllm.facts.layouts import flat_storage
from leyline_engine.vllm.facts.worker_facts import WorkerFacts
from leyline_engine.vllm.orders import Orders, RowMove, Slots

log = logging.getLogger(__name__)


class WorkerRows:
    """Rows of one worker's KV cache.

    Args:
        pool: copies, turns and overwrites them.
        block: tokens per block.
    """

    def __init__(self, pool: SplicePool, block: int) -> None:
        self.pool = pool
        self._block = block
        self._failed: set[int] = set()

    @classmethod
    def of(cls, facts: WorkerFacts, kv_caches: Mapping[str, torch.Tensor]) -> WorkerRows:
        """Return the rows of a worker that has measured them.

        Args:
            kv_caches: the KV cache of each layer by name.
        """
        assert facts.layouts is not None and facts.rotary is not None  # noqa: S101 - it splices
        rotary = facts.rotary.whole()
        views = [each.rows(flat_storage(kv_caches[name])) for name, each in facts.layouts.items()]
        tensors = pool_of_views(
            [keys for keys, _ in views],
            [values for _, values in views if values is not None],
            capacity=(facts.blocks - 1) * facts.block_size,
        ).turning(facts.start, rotary.dim)
        pool = SplicePool(tensors, rotary, origins=origin_rows(tensors, origin_bytes_from()))
        return cls(pool, facts.block_size)

    def carry_out(self, orders: Orders) -> None:
        """Overwrite rows, then copy others; the forward that needs them comes after."""
        if len(orders.erase):
            self.pool.erase(self._slots(orders.erase))
        for move in orders.moves:
            self._move(move)
        self._failed.update(orders.spoilt)

    def _move(self, move: RowMove) -> None:
        try:
            source, target = self._slots(move.source), self._slots(move.target)
            self.pool.splice(source, target, move.source_start, move.dest_start)
        except Exception:
            log.exception("rows could not be copied; their tokens are computed instead")
            self._failed.update(np.unique(move.target // self._block).tolist())

    def _slots(self, slots: Slots) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(slots)).to(self.pool.tensors.device)

    def take_failed(self) -> set[int]:
        """Return the ids of blocks whose rows were not copied since the last call."""
        failed, self._failed = self._failed, set()
        return failed
