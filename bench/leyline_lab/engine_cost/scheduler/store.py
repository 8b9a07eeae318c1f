"""SGLang's pool, allocator and tree without a model, and what its admission looks at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from leyline_engine.contract import ForgetCounts, Proof, TurnRecord
from leyline_engine.rotary.rotation import Pairing, Rotary
from leyline_engine.server.channel import SilentSender

LATENT, ROTARY, LAYERS = 4, 8, 2


class Receipts(SilentSender):
    """A sender that keeps what it is given."""

    def __init__(self) -> None:
        self.records: dict[str, TurnRecord] = {}
        self.forgotten: dict[str, ForgetCounts] = {}
        self.proofs: dict[str, Proof] = {}

    def send(self, record: TurnRecord, scope: str = "") -> None:
        self.records[record.receipt.message_id] = record

    def update_forgot(self, message_id: str, counts: ForgetCounts) -> None:
        self.forgotten[message_id] = counts

    def update_proof(self, message_id: str, proof: Proof) -> None:
        self.proofs[message_id] = proof


@dataclass
class Batch:
    """The parts of the running batch that SGLang's admission looks at."""

    reqs: list[Req] = field(default_factory=list)

    def is_empty(self) -> bool:
        return not self.reqs

    def batch_size(self) -> int:
        return len(self.reqs)


def rotary_facts() -> Rotary:
    """Return the rotary facts of the pool's keys."""
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, ROTARY, 2, dtype=torch.float32) / ROTARY)
    return Rotary(frequencies, Pairing.INTERLEAVED)


class Store:
    """One pool of an MLA model, its allocator, requests' rows and the tree.

    Args:
        tree: class of the tree.
        capacity: slots of the pool; as in SGLang, it has whole pages only.
        longest: tokens of the longest request.
        rows: requests that may run at once.
        options: of the tree.
    """

    components: tuple[ComponentType, ...] = (ComponentType.FULL,)
    """Parts of the tree's nodes."""
    tree_options: Mapping[str, Any] = MappingProxyType({})
    """Options that go with them."""

    def __init__(
        self,
        tree: type[Any],
        capacity: int,
        longest: int,
        *,
        page: int = 1,
        dtype: torch.dtype = torch.float32,
        rows: int = 16,
        **options: Any,
    ) -> None:
        self.page = page
        self.capacity = capacity - capacity % page
        self.latent = LATENT * 4 // dtype.itemsize
        self._open_pools(dtype, rows, longest)
        self.cache: Any = tree(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=page,
                tree_components=self.components,
                **self.tree_options,
                **options,
            )
        )

    def _open_pools(self, dtype: torch.dtype, rows: int, longest: int) -> None:
        """Make the pool, its allocator and the requests' rows."""
        self.pool: Any = MLATokenToKVPool(
            self.capacity, self.page, dtype, self.latent, ROTARY, LAYERS, "cpu", False
        )
        self.allocator: Any = self._allocator_of(self.pool)
        self.rows: Any = ReqToTokenPool(rows, longest, "cpu", False)

    def _allocator_of(self, pool: Any) -> Any:
        """Return SGLang's allocator of a pool."""
        kind = TokenToKVPoolAllocator if self.page == 1 else PagedTokenToKVPoolAllocator
        sizes = (self.capacity,) if self.page == 1 else (self.capacity, self.page)
        return kind(*sizes, torch.float32, "cpu", pool, False)

    def take(self, req: Req, start: int, end: int) -> None:
        """Take slots for a request's positions, as SGLang does before a forward."""
        count = (-(-end // self.page) - -(-start // self.page)) * self.page
        self._make_room(count)
        slots = self.allocator.alloc(count) if self.page == 1 else self._pages(req, start, end)
        assert slots is not None, "admission promised more than there is"
        self.rows.write((req.kv.req_pool_idx, slice(start, end)), slots)
        req.kv.kv_allocated_len = req.kv.kv_committed_len = end

    def _make_room(self, count: int) -> None:
        """Evict what stands in the way of ``count`` slots."""
        missing = count - self.allocator.available_size()
        if missing > 0:
            self.cache.evict(EvictParams(num_tokens=missing))

    def _pages(self, req: Req, start: int, end: int) -> torch.Tensor | None:
        row = self.rows.req_to_token[req.kv.req_pool_idx]
        last = row[start - 1 : start].long() if start else torch.tensor([-1])
        starts, ends = torch.tensor([start]), torch.tensor([end])
        slots: torch.Tensor | None = self.allocator.alloc_extend(
            starts, starts, ends, ends, last, end - start
        )
        return slots

    def begin(self, req: Req) -> None:
        """Give a request a row, which begins with its cached prefix."""
        assert self.rows.alloc([req]) is not None
        prefix = self.cache.prefix_device_indices(req)
        self.rows.write((req.kv.req_pool_idx, slice(0, req.prefix_len)), prefix)
        req.kv.cache_protected_len = req.prefix_len
