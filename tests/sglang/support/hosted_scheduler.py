"""The scheduler without a model, above SGLang's own host pool, controller and copies (HiCache).

On a CPU, copies are done when they are begun. A test can hold those to the host, so that it forgets
while some are on their way: they arrive when somebody waits for them, or a test releases them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from scheduler_kit import Scheduler
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.l2_transfer import TransferCompletion
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.runtime_context import get_context
from sglang.srt.server_args import ServerArgs

from leyline_engine.records.lineage import MAX_TOKEN
from leyline_engine.sglang.host_tree import CORE, HostedRadixCache
from leyline_engine.sglang.rows.host import open_host_rows
from leyline_lab.sglang_cpu.host_tier import register_host_tier

_CHECK_EVERY = 8
"""Steps between two looks at every copy, which take as long as a few."""


@dataclass
class _Copy:
    """Copies to the host on their way, and the event that tells of their end."""

    copy: Callable[[], object]
    steps: int
    """Steps of SGLang's loop until they arrive by themselves; 0 for never."""
    done: bool = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        if not self.done:
            self.done = True
            self.copy()


class HostedScheduler(Scheduler):
    """A scheduler with a host pool.

    Args:
        ratio: slots of the host's pool for each of the device's.
        policy: SGLang's write policy.
        layout: SGLang's layout of the host's pool.
        delay: steps of SGLang's loop after which copies to the host have arrived.
    """

    def __init__(
        self,
        capacity: int = 400,
        *,
        ratio: float = 2.0,
        policy: str = "write_through",
        layout: str = "layer_first",
        delay: int = 0,
        **options: Any,
    ) -> None:
        register_host_tier()
        self._arguments = ServerArgs(
            model_path="none",
            device="cpu",
            enable_hierarchical_cache=True,
            hicache_ratio=ratio,
            hicache_io_backend="direct",
            hicache_mem_layout=layout,
            hicache_write_policy=policy,
        )
        get_context().set_server_args(self._arguments)
        self.holds = bool(delay)
        """True to hold copies to the host that begin."""
        self.held: list[_Copy] = []
        self._delay = delay
        self._checks = 0
        super().__init__(capacity, core=CORE, tree=self._made, **options)

    def _made(self, params: CacheInitParams) -> HostedRadixCache:
        self._parameters = params
        self.tree = HostedRadixCache(params)
        return self.tree

    def _attach_host(self) -> None:
        self.tree.init_hicache(self._arguments, self._parameters)
        transfers = self.tree.cache_controller.l2_transfer_engine
        submit = transfers.submit_device_to_host

        def begin(moves: Any) -> Any:
            if not self.holds:
                return submit(moves)
            copy = _Copy(lambda: submit(moves), self._delay)
            self.held.append(copy)
            return TransferCompletion(copy, copy, False)

        transfers.submit_device_to_host = begin
        if self.splicing is not None:
            self.splicing.host = open_host_rows(self.tree, self.splicing.tensors)

    def release(self) -> None:
        """Let the copies arrive that were held, in order."""
        self.holds = False
        for copy in self.held:
            copy.synchronize()
        self.held.clear()

    def settle(self) -> None:
        """Pass through SGLang's loop while nothing runs."""
        self._pass()
        self.engine.chores.step()
        self.check()

    def drain(self, rounds: int = 400) -> None:
        """Run until nothing is left to do, or on its way."""
        super().drain(rounds)
        while self.tree.ongoing_load_back or (
            self.tree.ongoing_write_through and not self._held_for_good()
        ):
            self.settle()
        super().drain(rounds)

    def _held_for_good(self) -> bool:
        return any(copy.steps <= 0 for copy in self.held)

    def _pass(self) -> None:
        for copy in self.held:
            copy.steps -= 1
            if copy.steps == 0:
                copy.synchronize()
        self.held = [copy for copy in self.held if not copy.done]
        self.tree.check_hicache_events()

    def demote(self, tokens: int | None = None) -> None:
        """Evict from the device; all that can be, if no number is given."""
        self.settle()
        self.tree.evict(EvictParams(num_tokens=self.capacity if tokens is None else tokens))
        self.check()

    # SGLang's loop, where it serves the host's pool.

    def _admit(self) -> list[Req]:
        self._pass()
        batch = super()._admit()
        if batch:
            self.tree.ready_to_load_host_cache()
        return batch

    def _processed(self, batch: list[Req]) -> None:
        super()._processed(batch)
        self.tree.flush_pending_backups()

    # What the host's pool holds.

    @property
    def host_pool(self) -> Any:
        """SGLang's host pool."""
        return self.tree.host_pool_group.anchor_entry.host_pool

    def read_host(self, slots: torch.Tensor) -> list[tuple[int, int, int]]:
        """(token, history, nonce) of each host slot."""
        latents = self.host_pool.data_refs[-1][slots, 0, : self.latent].contiguous()
        rows = latents.view(torch.float32)[:, :3].long()
        return [(int(t), int(h), int(n)) for t, h, n in rows]

    def remembered_by_host(self) -> frozenset[int]:
        """Every secret that any row of the host's pool has read, free ones included."""
        nonces = {nonce for *_, nonce in self.read_host(torch.arange(self.host_pool.size))}
        return frozenset(secret for nonce in nonces for secret in self.has_read[nonce])

    def everywhere(self) -> frozenset[int]:
        return super().everywhere() | self.remembered_by_host()

    def copies(self) -> int:
        """Host slots in use."""
        return int(self.host_pool.slot_used.sum())

    def nodes(self) -> Iterator[Any]:
        """Every node of the tree but the root."""
        stack = [*self.tree.tree_core.root_node.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self) -> None:
        """Copies are those of their nodes' rows, and no host slot is lost."""
        super().check()
        self._checks += 1
        if self._checks % _CHECK_EVERY:
            return
        if not (self.tree.ongoing_load_back or self.tree.ongoing_write_through):
            self.tree.sanity_check()
        used = 0
        for node in self.nodes():
            data = node.component_data[ComponentType.FULL]
            if data.host_value is None:
                continue
            used += len(data.host_value)
            if node.write_through_pending_id is not None:
                continue
            tokens = [key & MAX_TOKEN for key in node.key.raw_token_ids()]
            assert [token for token, _, _ in self.read_host(data.host_value)] == tokens
            if data.value is not None and self.tree.readable(data.value) == len(data.value):
                assert [token for token, _, _ in self.read(data.value)] == tokens
        assert used == self.copies()
