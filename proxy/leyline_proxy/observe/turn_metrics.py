"""Counting turns."""

from __future__ import annotations

from leyline_engine.contract import Reason, Receipt

from ..model.places import owed
from ..model.session import Session
from ..telemetry.metrics import Metrics, by_source, exemplar
from ..turns.accounting import forget_result
from ..turns.settled import SettledTurn, generated_tokens
from ..turns.turn import Turn


class TurnMetrics:
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

    def abandoned(self, turn: Turn, model: str) -> None:
        """Do nothing: the request is counted by its status."""


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
