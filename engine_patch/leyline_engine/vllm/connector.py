"""Leyline as a KV connector of vLLM: in the scheduler its decisions, in each worker its rows."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from secrets import token_bytes
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)

from leyline_engine.admit.packed_hints import hints_secret
from leyline_engine.contract import Capability
from leyline_engine.occupancy import RegistryLevels
from leyline_engine.records.lineage import SALT_BYTES
from leyline_engine.records.sources import SourceRegistry
from leyline_engine.server.channel import open_sender
from leyline_engine.server.claim_desk import limits_from
from leyline_engine.server.counts import SentMetrics
from leyline_engine.settings import copy_limits, recompute_from
from leyline_engine.vllm.block_keys import PathHasher
from leyline_engine.vllm.blocks import BlockCache
from leyline_engine.vllm.claim_desk import Keys, SchedulerClaims
from leyline_engine.vllm.engine import SchedulerEngine
from leyline_engine.vllm.facts.setup import capability
from leyline_engine.vllm.facts.worker_facts import WorkerFacts
from leyline_engine.vllm.hints import take_hints
from leyline_engine.vllm.orders import Orders
from leyline_engine.vllm.worker import WorkerRows

log = logging.getLogger(__name__)


@dataclass
class StepOrders(KVConnectorMetadata):
    """One step's orders, as vLLM takes them to the workers."""

    orders: Orders = field(default_factory=Orders)


@dataclass
class MeasuredWorker(KVConnectorHandshakeMetadata):
    """A worker's facts, as vLLM takes them to the scheduler."""

    facts: WorkerFacts


class LeylineConnector(KVConnectorBase_V1):
    """Both ends of Leyline in one vLLM engine (``kv_connector: LeylineConnector``)."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        # A worker's failure to copy rows costs a prefill, not the request.
        vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
        self._config = vllm_config
        self._kv_config = kv_cache_config
        self._scheduler: Any = None
        self.leyline: SchedulerEngine | None = None
        self.rows: WorkerRows | None = None
        self._facts: WorkerFacts | None = None
        self._metrics = SentMetrics(lambda _: None)

    @property
    def requires_kv_delivery(self) -> bool:
        """Always False: what is copied stays in this engine, and may be computed again."""
        return False

    # Scheduler.

    def open(self, scheduler: Any) -> None:
        """Take the scheduler that this connector serves."""
        self._scheduler = scheduler

    def set_xfer_handshake_metadata(
        self, metadata: Mapping[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Begin to serve, once all workers have measured their rows."""
        facts = [each.facts for each in metadata.values() if isinstance(each, MeasuredWorker)]
        found = capability(self._config, self._kv_config, facts)
        self.leyline = self._opened(found)
        if found.splices:
            log.info("Leyline splices the KV cache of this engine")
        else:
            log.warning("Leyline does not splice here: %s", found.unsupported_reason)

    def _opened(self, found: Capability) -> SchedulerEngine:
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import (
            get_request_block_hasher,
            make_block_hash_with_group_id,
        )

        manager = self._scheduler.kv_cache_manager
        block = int(self._scheduler.block_size)
        hash_name = self._config.cache_config.prefix_caching_hash_algo
        hasher = get_request_block_hasher(block, get_hash_fn_by_name(hash_name))
        min_copy, stage_cost = copy_limits()
        sender = open_sender(attn_tp_rank=0, dp_rank=0)
        self._metrics = SentMetrics(sender.count)
        return SchedulerEngine(
            BlockCache(
                manager.block_pool,
                block,
                make_block_hash_with_group_id,
                evicted=lambda blocks: self._metrics.evicted(len(blocks) * block),
            ),
            PathHasher(hasher, block),
            found,
            sender,
            self._metrics,
            blocks_of=lambda request: list(manager.get_blocks(request).blocks[0]),
            read_hints=take_hints,
            secret=hints_secret(),
            salt=token_bytes(SALT_BYTES),
            min_copy=min_copy,
            stage_cost=stage_cost,
            bytes_per_token=found.kv.bytes_per_token if found.kv else 0,
            recompute=recompute_from(found),
            open_claims=self.open_claims,
        )

    def open_claims(
        self, cache: BlockCache, registry: SourceRegistry, keys: Keys, capability: Capability
    ) -> SchedulerClaims:
        """Open the claims on this engine's blocks, within the operator's limits."""
        return SchedulerClaims(cache, registry, keys, capability, limits=limits_from())

    def on_new_request(self, request: Any) -> None:
        """Read a new request's envelope."""
        if self.leyline is not None:
            self.leyline.receive(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens after a waiting request's cached prefix will be copied."""
        if self.leyline is None:
            return 0, False
        return self.leyline.matched(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Record that a waiting request has its blocks."""
        if self.leyline is not None:
            self.leyline.allocated(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return the orders of a step."""
        if self.leyline is None:
            return StepOrders()
        orders = self.leyline.stepped(scheduler_output.num_scheduled_tokens)
        if self._metrics.is_due or not scheduler_output.total_num_scheduled_tokens:
            self._metrics.registries(RegistryLevels.of(self.leyline.registry, self.leyline.ledger))
            self._metrics.flush()
        return StepOrders(orders)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Record that a request ended."""
        if self.leyline is not None:
            from vllm.v1.request import RequestStatus

            failed = {RequestStatus.FINISHED_ERROR, RequestStatus.FINISHED_IGNORED}
            answered = request.status not in failed and request.num_output_tokens > 0
            self.leyline.ended(request, answered=answered)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Return True if rows are to be overwritten, though no request may run."""
        return self.leyline is not None and self.leyline.has_orders

    def reset_cache(self) -> bool:
        """Return True: the connector has no KV of its own."""
        return True

    # Workers.

    def measured(self, facts: WorkerFacts, kv_caches: Mapping[str, Any]) -> None:
        """Take the facts of this worker, and open its rows.

        Args:
            kv_caches: the KV cache of each layer by name.
        """
        if facts.splices:
            try:
                self.rows = WorkerRows.of(facts, kv_caches)
            except Exception as error:
                log.exception("Leyline can't open this worker's rows")
                facts = WorkerFacts(
                    rank=facts.rank,
                    architecture=facts.architecture,
                    fingerprint=facts.fingerprint,
                    refusal=f"the rows can't be opened ({type(error).__name__})",
                )
        self._facts = facts

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return this worker's facts."""
        return None if self._facts is None else MeasuredWorker(self._facts)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Carry the step's orders out."""
        if self.rows is not None and self.has_connector_metadata():
            meta = self._get_connector_metadata()
            assert isinstance(meta, StepOrders)  # noqa: S101 - the scheduler's end made it
            self.rows.carry_out(meta.orders)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks whose rows could not be copied; vLLM computes them again."""
        return set() if self.rows is None else self.rows.take_failed()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: all rows are there before the forward."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: nothing is saved elsewhere."""

    def wait_for_save(self) -> None:
        """Do nothing: nothing is saved elsewhere."""
