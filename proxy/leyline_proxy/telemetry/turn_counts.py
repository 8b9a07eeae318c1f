"""Counting a settled turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from leyline_engine.contract import CopySegment, Outcome, Reason, Receipt, TurnRecord

from ..core.busts import CacheAccount, settle
from ..core.forgetting import ForgetResult
from ..pipeline.accounting import cached_of_usage
from ..pipeline.turn import Turn
from .metrics import Metrics, exemplar
from .tracing.notes import note_bust


@dataclass(frozen=True, slots=True)
class Settled:
    """A turn that was answered in full, and what is known of it."""

    turn: Turn
    receipt: Receipt
    record: TurnRecord | None
    """The engine's; None where it gave none."""
    usage: Mapping[str, Any] | None
    ttft_s: float | None
    """Seconds to the first token; None where there was none."""
    avoided_s: float = 0.0
    """Seconds of prefill that its splice spared; an estimate."""


def count_refused(metrics: Metrics, turn: Turn, receipt: Receipt, model: str) -> None:
    """Add a turn that didn't run to its end for the sake of claims; it has no tokens.

    Args:
        model: as a label.
    """
    tenant, reason = turn.request.tenant.name, Reason.REFUSED_BY_CLAIM.value
    metrics.meet(tenant, model)
    metrics.turns.labels(tenant, model, receipt.outcome.value, reason).inc()
    metrics.claim_refusals.labels(tenant).inc()


def count_forget(metrics: Metrics, turn: Turn, result: ForgetResult | None) -> None:
    """Add a turn's demand to forget, if it had one.

    Args:
        result: what came of it; None where nothing was demanded.
    """
    if result is not None:
        metrics.forgets.labels(turn.request.tenant.name, result).inc()


def count_overhead(metrics: Metrics, turn: Turn, account_s: float) -> None:
    """Add the time that a turn took in the proxy itself.

    Args:
        account_s: seconds since the engine's answer and receipt were there.
    """
    metrics.overhead_seconds.observe(turn.own_s + account_s, exemplar(turn.message_id))


def count_turn(metrics: Metrics, settled: Settled, model: str) -> CacheAccount:
    """Add a turn to the metrics; returns where its prompt tokens came from.

    Args:
        model: as a label.
    """
    turn, receipt, ttft_s = settled.turn, settled.receipt, settled.ttft_s
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
    if generated := _generated(settled):
        metrics.completion_tokens.labels(tenant, model).inc(generated)
    return _count_cache(metrics, settled, tenant, model)


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


def _count_splice(metrics: Metrics, settled: Settled, tenant: str, model: str) -> None:
    """What the engine did with directives, and what that spared."""
    receipt = settled.receipt
    for result in receipt.directives:
        metrics.directives.labels(result.mode.value, result.reason.value).inc()
    inherited = {run.lineage for run in settled.turn.planned.plan.lineage}
    if any(run.lineage not in inherited for run in receipt.lineage):
        metrics.lineages.labels(tenant, model).inc()
    if receipt.outcome is Outcome.SPLICED and receipt.tokens.spliced > 0:
        metrics.prefill_avoided_tokens.labels(tenant, model).inc(receipt.tokens.spliced)
        metrics.prefill_avoided_seconds.labels(tenant, model).inc(settled.avoided_s)


def _generated(settled: Settled) -> int:
    """Tokens of the answer, as far as the engine told."""
    told = settled.usage.get("completion_tokens") if settled.usage is not None else None
    if isinstance(told, int):
        return max(0, told)
    return len(settled.record.output_ids) if settled.record is not None else 0


def _count_cache(metrics: Metrics, settled: Settled, tenant: str, model: str) -> CacheAccount:
    plan = settled.turn.planned.plan
    account = settle(
        plan.reach,
        settled.receipt.tokens,
        copies=[(s.dest, s.dest_end) for s in plan.segments if isinstance(s, CopySegment)],
        told=cached_of_usage(settled.usage),
        # What is forgotten takes along whatever has read it, cached or not.
        reconciled=not plan.forgets,
    )
    metrics.count_busts(tenant, model, account.busts)
    for cause, tokens in account.busts.items():
        note_bust(cause, tokens)
    for direction, tokens in (("lost", account.missing), ("found", account.found)):
        if tokens:
            metrics.cache_discrepancy_tokens.labels(tenant, model, direction).inc(tokens)
    return account
