"""Prometheus series of a scheduler, on SGLang's own ``/metrics``.

SGLang collects the series that all its processes write below ``PROMETHEUS_MULTIPROC_DIR``; series
that a scheduler defines appear by themselves. Levels are read between two forwards, once a second
and when the scheduler falls idle, never at each forward.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from leyline_engine.claims.keeper import ClaimKeeper
from leyline_engine.energy import EnergyAccount
from leyline_engine.metrics import EngineMetrics, NoMetrics, PrometheusMetrics
from leyline_engine.occupancy import RegistryLevels, held_by_claims
from leyline_engine.records.ledger import SpanLedger
from leyline_engine.records.sources import SourceRegistry
from leyline_engine.scheduler.containment import contained
from leyline_engine.sglang.census import Census
from leyline_engine.sglang.stage_row import StageRow

EVERY_S = 1.0

_IDLE_STEPS = 2
"""Number of first steps without a batch at which levels are read.

With overlap scheduling, the last batch's requests end in the first step without a batch.
"""


def open_metrics(*, enabled: bool, attn_tp_rank: int) -> EngineMetrics:
    """Return the metrics of a scheduler.

    Args:
        enabled: the server's ``--enable-metrics``.
        attn_tp_rank: only rank 0 counts; the others do the same work again.
    """
    return PrometheusMetrics() if enabled and attn_tp_rank == 0 else NoMetrics()


class Readings:
    """Reads the levels that gauges show.

    Args:
        census: None if the pool's slots aren't one per token.
        energy: shares of requests, if energy is counted.
        now_s: a clock that never goes back.
    """

    def __init__(
        self,
        metrics: EngineMetrics,
        registry: SourceRegistry,
        ledger: SpanLedger,
        keeper: ClaimKeeper,
        *,
        census: Census | None,
        energy: EnergyAccount | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._registry = registry
        self._ledger = ledger
        self._keeper = keeper
        self._census = census
        self._energy = energy
        self._now_s = now_s
        self._due_s = 0.0
        self._idle = 0

    def stepped(self, batch: Any) -> None:
        """Note that the scheduler chose its next batch, if any, and took the slots it needs."""
        if not self._metrics.collects:
            return
        with contained("counting a step"):
            if self._census is not None:
                self._census.note_peak()
            if batch is not None and self._energy is not None:
                self._share(batch, self._energy)
        self._idle = 0 if batch is not None else self._idle + 1
        now = self._now_s()
        if now >= self._due_s or 0 < self._idle <= _IDLE_STEPS:
            self._due_s = now + EVERY_S
            with contained("reading levels"):
                self.read()

    def _share(self, batch: Any, energy: EnergyAccount) -> None:
        counts = batch.extend_lens if batch.forward_mode.is_extend() else [1] * len(batch.reqs)
        for req, tokens in zip(batch.reqs, counts, strict=True):
            energy.computed(_request_of(req), tokens)

    def released(self, req: Any) -> None:
        """Note that a request gave its slots back."""
        if self._energy is not None and not isinstance(req, StageRow) and req.finished():
            self._energy.ended(req.rid)

    def dropped(self, rid: str) -> None:
        """Note that a request that holds no slots will not run, or not continue."""
        if self._energy is not None:
            self._energy.ended(rid)

    def read(self) -> None:
        """Set the gauges to the present levels."""
        if self._census is not None:
            page = self._keeper.book.arithmetic.page_size
            claimed = held_by_claims(self._keeper.holds(), page)
            self._metrics.pool(self._census.levels(claimed))
        self._metrics.registries(RegistryLevels.of(self._registry, self._ledger))
        if self._energy is not None:
            self._energy.settle()


def _request_of(req: Any) -> str:
    """Return the request for which a row runs; an engine's own row works for another."""
    rid: str = req.leyline.req.rid if isinstance(req, StageRow) else req.rid
    return rid
