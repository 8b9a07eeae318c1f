"""Counts of turns, and of recalls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from leyline_engine.contract import Reason, Receipt

from ..model.places import owed
from ..model.session import Session
from ..model.working_set import PieceReport, PieceVerdict
from ..parts.limits import Owner
from ..telemetry.metrics import Metrics, by_source, exemplar
from ..turns.accounting import forget_result
from ..turns.ports import TurnObserver
from ..turns.settled import SettledTurn, generated_tokens
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


class TurnMetrics(TurnObserver):
    """Adds turns to the metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def settled(self, settled: SettledTurn, session: Session) -> None:
        """Add a turn; of a policy's question, which no caller sent, its tokens alone."""
        metrics, turn = self._metrics, settled.turn
        if turn.asks is not None:
            _count_question(metrics, settled)
            return
        _count_turn(metrics, settled)
        result = forget_result(turn, settled.receipt, len(owed(session.places)))
        if result is not None:
            metrics.forgets.labels(turn.request.tenant.name, result).inc()

    def refused(self, turn: Turn, receipt: Receipt, model: str) -> None:
        """Add a turn that didn't run to its end; it has no tokens."""
        metrics, tenant = self._metrics, turn.request.tenant.name
        metrics.meet(tenant, model)
        reason = Reason.REFUSED_BY_CLAIM.value
        metrics.turns.labels(tenant, model, receipt.outcome.value, reason).inc()
        metrics.claim_refusals.labels(tenant).inc()


def _count_turn(metrics: Metrics, settled: SettledTurn) -> None:
    turn, receipt, ttft_s = settled.turn, settled.receipt, settled.ttft_s
    model = settled.model
    tenant, upstream, outcome = turn.request.tenant.name, turn.replica.name, receipt.outcome.value
    metrics.meet(tenant, model)
    reason = receipt.reason.value if receipt.reason else "none"
    metrics.turns.labels(tenant, model, outcome, reason).inc()
    metrics.upstream_turns.labels(upstream, outcome).inc()
    metrics.count_tokens(tenant, model, upstream, receipt.tokens, turn.index)
    if ttft_s is not None:
        metrics.ttft_seconds.labels(tenant, model, outcome).observe(
            ttft_s, exemplar(turn.message_id)
        )
        metrics.upstream_ttft_seconds.labels(upstream, outcome).observe(ttft_s)
    if turn.enveloped and settled.record is None:
        metrics.receipts_missing.labels(model).inc()
    _count_edits(metrics, turn, tenant, reason)
    _count_splice(metrics, settled, tenant, model)
    if generated := generated_tokens(settled.record, settled.usage):
        metrics.completion_tokens.labels(tenant, model).inc(generated)
    account = settled.cache
    metrics.count_busts(tenant, model, account.busts)
    for effect, tokens in (("kept", account.after_thinking), ("lost", account.thinking)):
        if tokens:
            metrics.reasoning_edit_tokens.labels(tenant, model, effect).inc(tokens)
    for direction, tokens in (("lost", account.missing), ("found", account.found)):
        if tokens:
            metrics.cache_discrepancy_tokens.labels(tenant, model, direction).inc(tokens)


def _count_question(metrics: Metrics, settled: SettledTurn) -> None:
    generated = generated_tokens(settled.record, settled.usage)
    for source, count in (by_source(settled.receipt.tokens) | {"generated": generated}).items():
        if count:
            metrics.policy_completion_tokens.labels(source).inc(count)


def _count_edits(metrics: Metrics, turn: Turn, tenant: str, reason: str) -> None:
    prepared, decision = turn.planned.prepared, turn.planned.decision
    for edit in turn.planned.plan.edits:
        cause = edit.cause.partition(":")[0]
        became = reason if edit.cached else Reason.NOTHING_CACHED.value
        metrics.edits.labels(tenant, cause, edit.mode, became).inc()
    for fault in prepared.faults:
        metrics.policy_faults.labels(fault.policy, fault.fault).inc()
    for policy, mode in prepared.changes_of_policies():
        metrics.policy_messages.labels(policy, mode).inc()
    for note in prepared.notes:
        metrics.policy_notes.labels(note.policy, note.kind).inc()
    if decision is not None:
        metrics.schedule_decisions.labels(decision.value).inc()


def _count_splice(metrics: Metrics, settled: SettledTurn, tenant: str, model: str) -> None:
    """Count the engine's treatment of directives, and the prefill saved."""
    receipt = settled.receipt
    for result in receipt.directives:
        metrics.directives.labels(result.mode.value, result.reason.value).inc()
    inherited = {run.lineage for run in settled.turn.planned.plan.lineage}
    if any(run.lineage not in inherited for run in receipt.lineage):
        metrics.lineages.labels(tenant, model).inc()
    if receipt.state:
        metrics.kept_states.labels(tenant, model).inc()
    if receipt.reuse is not None:
        metrics.count_reuse(tenant, model, receipt.reuse)
    copied = receipt.tokens.spliced + receipt.tokens.reused
    if copied > 0:
        metrics.prefill_avoided_tokens.labels(tenant, model).inc(copied)
        metrics.prefill_avoided_seconds.labels(tenant, model).inc(settled.avoided_s)


class RecallMetrics(TurnObserver):
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
