"""Counting recalls, and the evicted texts that led to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from leyline_engine.contract import Receipt

from ..model.session import Session
from ..model.working_set import PieceReport, PieceVerdict
from ..parts.store import Owner
from ..telemetry.metrics import Metrics
from ..turns.settled import SettledTurn
from ..turns.turn import Turn
from .eviction_rates import EvictionRates, Work

Way = Literal["tool", "reference", "context", "api"]

PUT_BACK = frozenset({PieceVerdict.HIT, PieceVerdict.FAULT, PieceVerdict.RECOMPUTE})
_POSSIBLE: Mapping[Way, tuple[PieceVerdict, ...]] = {
    "tool": (PieceVerdict.HIT, PieceVerdict.FAULT),
    "reference": (PieceVerdict.HIT, PieceVerdict.RECOMPUTE),
    "context": (PieceVerdict.HIT, PieceVerdict.FAULT, PieceVerdict.RECOMPUTE),
    "api": (PieceVerdict.FAULT,),
}
"""Verdicts on texts that were put back, by way."""


class RecallMetrics:
    """Adds recalls to the metrics, and evictions to their rates."""

    def __init__(self, metrics: Metrics, rates: EvictionRates) -> None:
        self._metrics = metrics
        self._rates = rates
        self._met: set[str] = set()

    def settled(self, settled: SettledTurn, session: Session) -> None:
        """Add a turn."""
        turn = settled.turn
        tenant, prepared = turn.request.tenant, turn.planned.prepared
        recalled = [self._count(tenant.name, each.way, each.report) for each in settled.recalled]
        if not tenant.recall:
            return
        self._meet(tenant.name)
        owner = (tenant.name, turn.identity.session_id)
        if turn.planned.plan.forgets or turn.demands < session.demands:
            self._rates.forgotten(owner, session.demands)
            return
        addresses = tuple(each for each in recalled if each is not None)
        work = Work(
            owner,
            lambda entry: entry.turn(prepared, addresses),
            first=turn.index == 0,
            demands=turn.demands,
        )
        self._rates.add(work)

    def asked(self, owner: Owner, reports: Iterable[PieceReport]) -> None:
        """Add texts that a caller asked for apart from a turn."""
        self._meet(owner[0])
        found = [self._count(owner[0], "api", report) for report in reports]
        addresses = tuple(each for each in found if each is not None)
        if addresses:
            self._rates.add(Work(owner, lambda entry: entry.recalled(addresses)))

    def refused(self, turn: Turn, receipt: Receipt, model: str) -> None:
        """Do nothing: nothing was put back."""

    def abandoned(self, turn: Turn, model: str) -> None:
        """Do nothing: it is unknown what the model has read."""

    def _count(self, tenant: str, way: Way, report: PieceReport) -> str | None:
        """Count a recall; return the address of a text that was put back."""
        metrics, verdict = self._metrics, report.verdict
        cause = report.cause.value if report.cause is not None else "none"
        metrics.recalls.labels(tenant, way, verdict.value, cause).inc()
        if verdict not in PUT_BACK:
            return None
        metrics.recall_tokens.labels(tenant, way, verdict.value).inc(report.tokens)
        if way != "api":
            metrics.recall_prefilled_tokens.labels(tenant, way).inc(report.price_tokens)
        return report.address

    def _meet(self, tenant: str) -> None:
        """Start a tenant's series at 0, so that the first recall is an increase."""
        if tenant in self._met:
            return
        self._met.add(tenant)
        for way, verdicts in _POSSIBLE.items():
            for verdict in verdicts:
                self._metrics.recalls.labels(tenant, way, verdict.value, "none")
                self._metrics.recall_tokens.labels(tenant, way, verdict.value)
            if way != "api":
                self._metrics.recall_prefilled_tokens.labels(tenant, way)
