"""The scheduler without a model, for models that keep state per sequence: recurrent states, or
rows of layers with a sliding window, in SGLang's own pools.

A recurrent state holds the digest of all tokens that it has read, and the nonce of the computation
that wrote it; a row in a window holds what its row in the other layers holds, under keys of another
base. So the forward can check that it starts from what the contract demands: the state that follows
from the row in front of it, and windows of the sequence's own rows.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch
from scheduler_kit import Scheduler
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.mem_cache.allocation import ensure_mamba_capacity, evict_from_tree_cache
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.memory_pool import (
    HybridLinearKVPool,
    HybridReqToTokenPool,
    MLATokenToKVPool,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.runtime_context import get_context, mamba_track_grid
from sglang.srt.server_args import ServerArgs

from leyline_engine.rotary.rotation import Pairing, Rotary
from leyline_engine.rows.pool import SplicePool
from leyline_engine.rows.states import StatePool
from leyline_engine.sglang.rows.layouts import read_pool, read_states
from leyline_engine.sglang.rows.pages import free_slots
from leyline_lab.engine_cost.scheduler.store import LAYERS, ROTARY

GRID = 8
"""Tokens between two states that a forward keeps in the extra buffer."""
_HISTORY = 1 << 20
_NOTHING = (0, 0)


def after_row(row: tuple[int, int, int]) -> int:
    """Return the digest of all tokens up to a row's own."""
    token, history, _ = row
    return (history * 31 + token + 1) % _HISTORY


class RecurrentScheduler(Scheduler):
    """A scheduler of a model with recurrent layers.

    Args:
        states: slots of states.
        buffered: whether SGLang keeps an extra buffer, and so a state per :data:`GRID` tokens.
    """

    components = (ComponentType.FULL, ComponentType.MAMBA)

    def __init__(
        self, capacity: int = 2000, *, states: int = 64, buffered: bool = False, **options: Any
    ) -> None:
        self.slots, self.buffered = states, buffered
        self.tree_options = {"enable_mamba_extra_buffer": buffered}
        self._overlaps = bool(options.get("overlap"))
        self._tracks: dict[str, tuple[int, int]] = {}
        self._decodes = False
        self.started = 0
        """Forwards that started from a state that was not empty."""
        _publish(page=int(options.get("page", 1)), buffered=buffered)
        super().__init__(capacity, **options)

    def _open_pools(self, dtype: torch.dtype, rows: int, longest: int) -> None:
        layers = [0, 1, 3]
        shape = Mamba2StateShape.create(
            tp_world_size=1,
            intermediate_size=8,
            n_groups=1,
            num_heads=2,
            head_dim=4,
            state_size=4,
            conv_kernel=4,
        )
        kinds = Mamba2StateDType(conv=torch.float32, temporal=torch.float32)
        self.rows = HybridReqToTokenPool(
            size=rows,
            mamba_size=self.slots,
            mamba_spec_state_size=0,
            max_context_len=longest,
            device="cpu",
            enable_memory_saver=False,
            cache_params=Mamba2CacheParams(shape=shape, layers=layers, dtype=kinds),
            mamba_layer_ids=layers,
            enable_mamba_extra_buffer=self.buffered,
            enable_overlap_schedule=self._overlaps,
        )
        hybrid = HybridLinearKVPool(
            size=self.capacity,
            dtype=dtype,
            page_size=self.page,
            head_num=1,
            head_dim=self.latent + ROTARY,
            full_attention_layer_ids=[2, 4][:LAYERS],
            device="cpu",
            mamba_pool=self.rows.mamba_pool,
            use_mla=True,
            kv_lora_rank=self.latent,
            qk_rope_head_dim=ROTARY,
        )
        self.pool = hybrid.full_kv_pool
        self.allocator = self._allocator_of(hybrid)
        self.state_tensors = read_states(self.rows.mamba_pool)

    def _attach_host(self) -> None:
        if self.splicing is not None:
            self.splicing.states = StatePool(self.state_tensors)

    # A forward, and the states that it starts from and leaves.

    def begin(self, req: Req) -> None:
        ensure_mamba_capacity(self.rows, [req], self.cache)
        super().begin(req)

    def _prefill_slots(self, batch: list[Req]) -> None:
        super()._prefill_slots(batch)
        config = SimpleNamespace(hf_text_config=SimpleNamespace(mamba_chunk_size=GRID))
        forward = SimpleNamespace(
            model_config=config, tree_cache=self.cache, req_to_token_pool=self.rows
        )
        self._tracks = {}
        for req in batch if self.buffered else ():
            prepare = ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend
            entry = prepare(forward, req)
            if entry.track_mask:
                slot = int(req.kv.mamba_ping_pong_track_buffer[entry.track_position])
                self._tracks[req.rid] = (req.kv.mamba_last_track_seqlen, slot)
        ScheduleBatch._collect_deferred_mamba_cow_and_clear(forward, batch)
        if forward.mamba_clear_indices is not None:
            self.rows.mamba_pool.clear_slots(forward.mamba_clear_indices)
        if forward.mamba_cow_src_indices is not None:
            source, target = forward.mamba_cow_src_indices, forward.mamba_cow_dst_indices
            self.rows.mamba_pool.copy_from(source, target)

    def _compute(self, req: Req, start: int, end: int) -> None:
        live = int(req.kv.mamba_pool_idx)
        self._check_state(req, start, live)
        super()._compute(req, start, end)
        rows = self.rows_of(req)
        self.write_state(live, rows[end - 1])
        if req.rid in self._tracks:
            tracked, slot = self._tracks.pop(req.rid)
            assert start < tracked <= end
            self.write_state(slot, rows[tracked - 1])

    def _check_state(self, req: Req, start: int, live: int) -> None:
        """Check that a forward starts from the state that follows from the row in front of it."""
        digest, nonce = self.read_state(live)
        if not start:
            assert (digest, nonce) == _NOTHING, "a state that was not cleared"
            return
        self.started += 1
        rows = self.rows_of(req)[:start]
        assert digest == after_row(rows[-1]), f"the state at {start} is of another place"
        seen: set[int] = set()
        for _, _, each in rows:
            seen |= self.has_read[each]
        assert self.has_read[nonce] <= seen, "a state has read what no row has"

    def _decode(self) -> None:
        """Decode as SGLang does: at the grid, the state goes to the extra buffer, too."""
        grid = mamba_track_grid(self.page) if self.buffered else 0
        for req in [running.req for running in self.running] if grid else ():
            end, index = req.kv.kv_committed_len + 1, req.kv.mamba_next_track_idx
            if end % grid == 0:
                self._tracks[req.rid] = (end, int(req.kv.mamba_ping_pong_track_buffer[index]))
        self._decodes = True
        super()._decode()
        self._decodes = False

    def _sample(self, req: Req) -> None:
        """Sample; a decode's state counts before its request ends."""
        kv, grid = req.kv, mamba_track_grid(self.page)
        if self._decodes and self.buffered and kv.kv_committed_len % grid == 0:
            kv.mamba_last_track_idx = kv.mamba_next_track_idx
            kv.mamba_prev_track_seqlen = kv.mamba_last_track_seqlen
            kv.mamba_last_track_seqlen = kv.kv_committed_len
            kv.mamba_next_track_idx = self.rows.get_mamba_ping_pong_other_idx(
                kv.mamba_last_track_idx
            )
        super()._sample(req)

    def write_state(self, slot: int, row: tuple[int, int, int]) -> None:
        """Write the state that follows from a row."""
        numbers = torch.tensor([after_row(row), row[2]], dtype=torch.float32)
        for tensor in self.state_tensors:
            tensor.view(*tensor.shape[:2], -1)[:, slot, :2] = numbers

    def read_state(self, slot: int) -> tuple[int, int]:
        """Return the digest and the nonce of a slot; all tensors and layers agree."""
        parts = [t.view(*t.shape[:2], -1)[:, slot, :2] for t in self.state_tensors]
        found = {(int(d), int(n)) for part in parts for d, n in part.tolist()}
        assert len(found) == 1, "a state of several places"
        return found.pop()

    # What SGLang's scheduler does with requests that are not admitted.

    def _passed_over(self, req: Req, adder: Any) -> None:
        if adder.can_run_list and req is adder.can_run_list[-1]:
            return
        req.kv.mamba_cow_src_index, req.kv.mamba_needs_clear = None, False
        if req.kv.holds_mamba:
            self.rows.mamba_allocator.free(req.kv.mamba_pool_idx.unsqueeze(-1))
            req.kv.mamba_pool_idx = None

    def abort(self, req: Req) -> None:
        waits = req in self.waiting
        super().abort(req)
        if waits and req.kv.holds_mamba:
            release_kv_cache(req, self.cache, checkpoint=False)

    # What must always hold.

    def everywhere(self) -> frozenset[int]:
        found = set(super().everywhere())
        for slot in range(1, self.slots + 1):
            found |= self.has_read[self.read_state(slot)[1]]
        return frozenset(found)

    def held_states(self) -> list[int]:
        """Slots of requests, waiting ones included."""
        found = []
        for req in tuple(self.cache.requests):
            if req.finished():  # its state is the tree's, or free
                continue
            if req.kv.holds_mamba:
                found.append(int(req.kv.mamba_pool_idx))
            buffer = req.kv.mamba_ping_pong_track_buffer
            if buffer is not None:
                found += [slot for slot in buffer.tolist() if slot >= 0]
        return found

    def check(self) -> None:
        super().check()
        free = self.rows.mamba_allocator.free_slots.tolist()
        cached = self.cache.all_mamba_values_flatten().tolist()
        assert len(cached) == self.cache.mamba_evictable_size() + self.cache.mamba_protected_size()
        every = Counter([*free, *cached, *self.held_states()])
        every.subtract(range(1, self.slots + 1))
        wrong = {slot: count for slot, count in every.items() if count}
        assert not wrong, f"slots of states are lost (-1), or held twice: {wrong}"
        assert all(self.read_state(slot) == _NOTHING for slot in free), "a free state is not empty"

    def check_idle(self) -> None:
        super().check_idle()
        assert self.cache.mamba_protected_size() == 0
        assert not self.held_states()
        self.cache.sanity_check()


class WindowScheduler(Scheduler):
    """A scheduler of a model of which some layers have a sliding window.

    Args:
        window: rows in front of a position that those layers read.
        windowed: slots of their rows.
    """

    components = (ComponentType.FULL, ComponentType.SWA)

    def __init__(
        self, capacity: int = 2000, *, window: int = 8, windowed: int = 800, **options: Any
    ) -> None:
        self.window, self.windowed_capacity = window, windowed
        self.tree_options = {"sliding_window_size": window}
        self.read_windows = 0
        """Rows that forwards have read in windows."""
        super().__init__(capacity, **options)
        places = torch.arange(len(self.keys))
        ones = torch.ones(len(places), 1, ROTARY)
        self.window_keys = _window_rotary().rotate(ones, torch.zeros_like(places), places)[:, 0]

    def _open_pools(self, dtype: torch.dtype, rows: int, longest: int) -> None:
        shape = {
            "page_size": self.page,
            "kv_lora_rank": self.latent,
            "qk_rope_head_dim": ROTARY,
            "device": "cpu",
            "enable_memory_saver": False,
        }
        self.kv = SWAKVPool(
            size=self.capacity,
            size_swa=self.windowed_capacity,
            page_size=self.page,
            dtype=dtype,
            head_num=1,
            head_dim=self.latent + ROTARY,
            swa_attention_layer_ids=[0, 2],
            full_attention_layer_ids=[1, 3],
            device="cpu",
            token_to_kv_pool_class=MLATokenToKVPool,
            full_kv_pool_kwargs=shape,
            swa_kv_pool_kwargs=shape,
        )
        self.pool, self.windowed = self.kv.full_kv_pool, self.kv.swa_kv_pool
        self.allocator = SWATokenToKVPoolAllocator(
            self.capacity, self.windowed_capacity, self.page, torch.float32, "cpu", self.kv, False
        )
        self.rows = ReqToTokenPool(rows, longest, "cpu", False)

    def _attach_host(self) -> None:
        if self.splicing is not None:
            tensors = read_pool(self.windowed).turning(self.latent, ROTARY)
            self.splicing.window = SplicePool(tensors, _window_rotary())

    def _make_room(self, count: int) -> None:
        evict_from_tree_cache(self.cache, count)

    def _room(self) -> int:
        windowed = self.allocator.swa_available_size() + self.cache.swa_evictable_size()
        rows = self.allocator.full_available_size() + self.cache.full_evictable_size()
        return int(min(rows, windowed))

    # A forward, and the rows that it reads in windows.

    def _decode(self) -> None:
        self.allocator.free_group_begin()
        for running in self.running:
            if len(running.req.output_ids) > 1:
                self.cache.evict_sliding_windows(running.req, running.req.seqlen - 1)
        self.allocator.free_group_end()
        super()._decode()

    def _compute(self, req: Req, start: int, end: int) -> None:
        slots = self.slots_of(req)[:end].long()
        self._check_window(req, slots, max(0, start - self.window), start)
        super()._compute(req, start, end)
        inside = self.inside(slots[start:end])
        assert bool((inside > 0).all()), "a new row has no place in the windows"
        for layer in range(LAYERS):
            self.windowed.kv_buffer[layer][inside] = self.pool.kv_buffer[0][slots[start:end]]
            self.windowed.kv_buffer[layer][inside, 0, self.latent :] = self.window_keys[start:end]

    def _check_window(self, req: Req, slots: torch.Tensor, start: int, end: int) -> None:
        """Check that windows have the rows of ``[start, end)``, at their positions."""
        inside = self.inside(slots[start:end])
        self.read_windows += len(inside)
        assert bool((inside > 0).all()), "a row in the window is not cached"
        for layer in range(LAYERS):
            keys = self.windowed.kv_buffer[layer][inside, 0, self.latent :]
            assert torch.allclose(keys, self.window_keys[start:end], atol=1e-4), "a key is off"
            theirs = self._contents(self.windowed.kv_buffer[layer], inside)
            mine = self._contents(self.pool.kv_buffer[layer], slots[start:end])
            assert torch.equal(theirs[:, 0], mine[:, 0]), "a window has another row"
            # SGLang keeps locked rows, and gives them windows of who computes them again.
            exact = max(0, self._exact(req, end) - start)
            assert torch.equal(theirs[:exact, 1], mine[:exact, 1]), "foreign memory in a window"
            seen = self.remembered(slots[:end])
            assert all(self.has_read[n] <= seen for n in theirs[:, 2].tolist()), "a foreign window"

    def _exact(self, req: Req, end: int) -> int:
        """Return how many leading rows of a request are under no lineage."""
        turn = self.engine.turn_of(req)
        return turn.lineage[0].start if turn is not None and turn.lineage else end

    def _contents(self, buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Token, history and nonce of rows, int64 ``[n, 3]``."""
        return buffer[slots, 0, :3].long()

    def inside(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the slots of rows in windows; 0 where there is none."""
        found: torch.Tensor = self.allocator.full_to_swa_index_mapping[slots.long()]
        return found

    # What must always hold.

    def everywhere(self) -> frozenset[int]:
        found = set(super().everywhere())
        every = torch.arange(self.page, self.windowed_capacity + self.page)
        for layer in range(LAYERS):
            for nonce in self._contents(self.windowed.kv_buffer[layer], every)[:, 2].tolist():
                found |= self.has_read[nonce]
        return frozenset(found)

    def check(self) -> None:
        super().check()
        own = [self.slots_of(req)[req.kv.cache_protected_len :] for req in self.holders()]
        cached = self.inside(self.cache.all_values_flatten())
        private = self.inside(torch.cat([*own, torch.empty(0, dtype=torch.int32)]))
        free = free_slots(self.allocator.swa_attn_allocator)
        cached, private = cached[cached > 0], private[private > 0]
        size = self.cache.swa_evictable_size() + self.cache.swa_protected_size()
        assert len(cached) == size, "the tree doesn't know its windows"
        pages = [torch.unique(each // self.page).tolist() for each in (cached, private, free)]
        every = Counter(page for each in pages for page in each)
        every.subtract(range(1, self.windowed_capacity // self.page + 1))
        wrong = {page: count for page, count in every.items() if count}
        assert not wrong, f"pages of windows are lost (-1), or held twice: {wrong}"

    def check_idle(self) -> None:
        super().check_idle()
        assert self.cache.swa_protected_size() == 0
        self.cache.sanity_check()


def _window_rotary() -> Rotary:
    frequencies = 1.0 / 500.0 ** (torch.arange(0, ROTARY, 2, dtype=torch.float32) / ROTARY)
    return Rotary(frequencies, Pairing.INTERLEAVED)


def _publish(*, page: int, buffered: bool) -> None:
    """Have SGLang's configuration say how states are kept."""
    before: Any = get_context().server_args
    strategy = "extra_buffer" if buffered else "no_buffer"
    args: Any = ServerArgs(
        model_path=before.model_path,
        device="cpu",
        page_size=page,
        mamba_radix_cache_strategy=strategy,
        mamba_track_interval=2 * GRID,
    )
    args._mamba_cache_chunk_size = max(GRID, page)
    get_context().set_server_args(args)
