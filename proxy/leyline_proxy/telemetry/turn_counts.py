"""Counting a settled turn."""

from __future__ import annotations

from leyline_engine.contract import Reason, Receipt

from ..pipeline.turn import Turn
from .metrics import Metrics


def count_refused(metrics: Metrics, turn: Turn, receipt: Receipt, model: str) -> None:
    """Add a turn that didn't run to its end for the sake of claims; it has no tokens.

    Args:
        model: as a label.
    """
    tenant, reason = turn.request.tenant.name, Reason.REFUSED_BY_CLAIM.value
    metrics.turns.labels(tenant, model, receipt.outcome.value, reason).inc()
    metrics.claim_refusals.labels(tenant).inc()


def count_turn(
    metrics: Metrics, turn: Turn, receipt: Receipt, model: str, ttft_s: float | None
) -> None:
    """Add a turn to the metrics.

    Args:
        model: as a label.
        ttft_s: seconds to its first token; None where there was none.
    """
    tenant, prepared = turn.request.tenant.name, turn.planned.prepared
    reason = receipt.reason.value if receipt.reason else "none"
    metrics.turns.labels(tenant, model, receipt.outcome.value, reason).inc()
    metrics.count_tokens(tenant, model, receipt.tokens, turn.index)
    for edit in turn.planned.plan.edits:
        cause = edit.cause.partition(":")[0]
        metrics.edits.labels(tenant, cause, edit.mode, reason).inc()
    for fault in prepared.faults:
        metrics.policy_faults.labels(fault.policy, fault.fault).inc()
    for policy, mode in prepared.changes_of_policies():
        metrics.policy_messages.labels(policy, mode).inc()
    for note in prepared.notes:
        metrics.policy_notes.labels(note.policy, note.kind).inc()
    if ttft_s is not None:
        metrics.ttft_seconds.labels(tenant, model, receipt.outcome.value).observe(ttft_s)
