"""The cache without a model: what each request of recorded traffic would find in it.

Admission, the radix tree, eviction, the ledger and content reuse are the engine's own; only KV is
missing. Nothing here needs tensors.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from leyline_engine.contract import (
    EditPayload,
    LineageRun,
    ReuseCounts,
    ReusePayload,
)
from leyline_engine.metrics import NoMetrics
from leyline_engine.records.ledger import SpanLedger
from leyline_engine.records.lineage import SALT_BYTES, fold_keys
from leyline_engine.records.retention import retain_turn
from leyline_engine.records.sources import SourceRegistry
from leyline_replay.admission import Admission, Admitter
from leyline_replay.cache.manager import CacheManager
from leyline_replay.cache.radix import EMPTY_SLOTS
from leyline_replay.cache.slots import PoolExhaustedError, SlotAllocator, Slots

if TYPE_CHECKING:
    from leyline_replay.cache.pool import KVPool

UNBOUNDED = 1 << 26
"""Tokens of a cache without a bound, as the index of content counts them: it keeps entries for so
many, and the tree keeps everything."""

_FIRST_SLOTS = 1 << 16


@dataclass(frozen=True, slots=True)
class Found:
    """The origin of one prompt's tokens."""

    prefix: int = 0
    edits: int = 0
    """Tokens that the payload's segments copy."""
    reuse: ReuseCounts | None = None
    """Content found elsewhere; None if it wasn't looked for."""
    lineage: tuple[LineageRun, ...] = ()
    """Lineage map of the turn, for the payloads of later ones."""
    retained: bool = True
    """False if the prompt didn't fit into the cache."""


class DryCache:
    """The caches and records of one engine, which are filled by the requests themselves.

    Args:
        tokens: bound of live tokens, above which the least recently used go; None for no bound.
        retained_turns: number of a session's turns that are sources of edits and of reuse.
        page_tokens: tokens per page.
    """

    def __init__(
        self, *, tokens: int | None = None, retained_turns: int = 8, page_tokens: int = 1
    ) -> None:
        registry = SourceRegistry(max_turns=retained_turns)
        kind = _UnboundedCache if tokens is None else CacheManager
        pool = cast("KVPool", _NoKV())
        self._cache = kind(
            pool,
            tokens or _FIRST_SLOTS,
            registry,
            SpanLedger(),
            NoMetrics(),
            page_tokens=page_tokens,
        )
        # Nobody can attack it, and the same traffic gives the same counts.
        self._admitter = Admitter(
            self._cache, splices=True, struck=lambda _, __: None, salt=bytes(SALT_BYTES)
        )

    def serve(
        self,
        prompt: array[int],
        output: array[int],
        payload: EditPayload,
        reuse: ReusePayload | None = None,
    ) -> Found:
        """Serve one request, whose turn is then cached and retained.

        Args:
            prompt: token ids, at least one.
            output: token ids of the answer.
            reuse: the request for reuse, if any.
        """
        try:
            admission = self._admitter.admit(payload.turn, prompt, payload, reuse=reuse)
        except PoolExhaustedError:
            return Found(retained=False)
        self._publish(admission, prompt, output, payload)
        source = retain_turn(
            self._cache.registry,
            self._cache.ledger,
            (payload.scope, payload.session),
            payload.turn,
            prompt=prompt,
            output=output,
            lineage=admission.lineage,
            spans=admission.spans,
            reuse=reuse,
        )
        self._admitter.retained(source)
        plan = admission.plan
        return Found(plan.prefix, plan.spliced, admission.reuse, admission.lineage)

    def _publish(
        self, admission: Admission, prompt: array[int], output: array[int], payload: EditPayload
    ) -> None:
        """Give the tree the request's slots; the last generated token has no KV."""
        cache, session = self._cache, (payload.scope, payload.session)
        cache.ledger.label(session, [label.span for label in admission.spans])
        if admission.carried is not None:
            cache.enter(payload.scope, admission.carried)
        tokens, held = prompt, admission.held
        try:
            held = np.concatenate([held, cache.allocate(max(0, len(output) - 1))])
            tokens = prompt + output[:-1]
        except PoolExhaustedError:
            pass  # the answer is cut off
        keys = fold_keys(tokens, admission.lineage, payload.scope)
        match = cache.publish(keys, held, admission.plan.prefix, admission.node, session)
        cache.release(held[match.length :])
        cache.unlock(match.node)


class _Layout:
    """The layout of a pool without tensors."""

    bytes_per_token = 0


class _NoKV:
    """Stands in for a pool where only slots are counted."""

    layout = _Layout()

    def copy(self, source: Slots, target: Slots, start: int) -> None:
        """Copy nothing."""

    def leave(self, slots: Slots) -> None:
        """Note nothing: no slot holds anything."""

    def left(self) -> Slots:
        """Return no slots."""
        return EMPTY_SLOTS

    def erase(self, slots: Slots) -> None:
        """Overwrite nothing."""


class _GrowingSlots(SlotAllocator):
    """An allocator whose pool grows when it is empty."""

    def allocate(self, count: int) -> Slots | None:
        """Return ``count`` slots."""
        if count > self._top:
            added = max(count, self.capacity)
            more = np.arange(self.capacity, self.capacity + added, dtype=np.int64)
            self._free = np.concatenate([self._free[: self._top], more, self._free[self._top :]])
            self.capacity += added
            self._top += added
        return super().allocate(count)


class _UnboundedCache(CacheManager):
    """A cache that evicts nothing."""

    def __init__(
        self,
        pool: KVPool,
        capacity: int,
        registry: SourceRegistry,
        ledger: SpanLedger,
        metrics: NoMetrics,
        *,
        page_tokens: int = 1,
    ) -> None:
        super().__init__(pool, capacity, registry, ledger, metrics, page_tokens=page_tokens)
        self._allocator = _GrowingSlots(capacity)

    @property
    def capacity(self) -> int:
        """The bound of what depends on a pool's size."""
        return UNBOUNDED

    @property
    def free_count(self) -> int:
        """Number of slots that can be allocated without eviction."""
        return UNBOUNDED
