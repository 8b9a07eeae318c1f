"""Plans from messages: policies, rendering, synthesis. Pure CPU work, no I/O."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import structlog

from leyline_engine.contract import (
    ATTENTION_SINK,
    LiteralSegment,
    Mode,
    Outcome,
    Reason,
    Recompute,
    RecurrentEdits,
)

from ..model.derived import Derived
from ..model.diff import diff_messages
from ..model.prepared import Prepared
from ..model.rendered import Rendered
from ..model.session import Departed, EditRecord, RetainedTurn, Session
from ..model.spans import ANYTHING, SpanNames
from ..model.states import splice_overhead
from ..model.verdicts import Verdict
from ..model.vocabulary import Decision
from ..request.identify import demands_forget
from ..telemetry.logging import frames_of
from ..telemetry.metrics import Metrics
from ..upstream.handshake import UpstreamStatus
from .derivation import derived_texts
from .draft import Draft
from .forgetting import all_to_forget, is_unreachable, spans_to_forget
from .naming import name_spans
from .plan_input import PlanInput
from .stripped import Decode
from .synthesis import TurnPlan, demands_of, synthesize
from .uncached import uncached_edits

log = structlog.get_logger("leyline.turn")


@dataclass(frozen=True, slots=True)
class Planned:
    """A turn's messages and the request to the engine."""

    prepared: Prepared
    rendered: Rendered | None
    names: SpanNames | None
    """None if planning failed; the turn's messages then have no names later."""
    plan: TurnPlan
    decision: Decision | None = None
    """The outcome for edits that could wait; None if there are none."""
    verdicts: tuple[Verdict, ...] = ()
    """Verdicts on the messages in quarantine."""
    derived: Derived | None = None
    """Texts that are derived from what is forgotten; None if nothing is."""


def plan_turn(
    given: PlanInput, draft: Draft, metrics: Metrics, tokens: Sequence[int] | None = None
) -> Planned:
    """Plan a turn. A failed plan never fails the turn, which is then sent unspliced.

    Args:
        tokens: the engine's answer to :attr:`Draft.question`.
    """
    prepared, rendered = draft.edited.prepared, draft.rendered
    if tokens is not None:
        with metrics.stage("render"):
            rendered = _located(given, prepared, tokens)
    names: SpanNames | None
    try:
        with metrics.stage("diff"):
            names, forget = _named(given, prepared, rendered)
        with metrics.stage("decide"):
            plan = _synthesize(given, prepared, rendered, names, forget)
            if draft.size is not None:
                plan = _too_long(plan)
    except Exception as error:  # a fault in here costs the splice, never the request
        log.error("synthesis_failed", error=type(error).__name__, frames=frames_of(error))
        names, plan = None, _failed(given, prepared)
    plan = _with_uncached(decide(plan, given.status, given.recurrent), prepared, given.session)
    demanded, traced = demands_forget(given.request), given.traced
    if is_unreachable(prepared, names, given.session, traced=traced, demanded=demanded):
        plan = replace(plan, unreachable=True)
    derived = _derived(given, prepared, names, plan)
    return Planned(prepared, rendered, names, plan, draft.edited.decision, derived=derived)


def _derived(
    given: PlanInput, prepared: Prepared, names: SpanNames | None, plan: TurnPlan
) -> Derived | None:
    try:
        return derived_texts(
            plan, prepared, names, given.session, turn=given.turn, index=given.index
        )
    except Exception as error:  # the account says that it is unknown; the turn is sent all the same
        log.error("derivation_failed", error=type(error).__name__, frames=frames_of(error))
        return Derived()


def decide(
    plan: TurnPlan, status: UpstreamStatus, recurrent: RecurrentEdits | None = None
) -> TurnPlan:
    """Withdraw the parts that this engine can't do, or whose states nobody asked for; record it.

    Args:
        recurrent: the promise about recurrent states, None if there are none. If it is exact, no
            earlier splice is continued either.
    """
    spliced = plan.planned is Outcome.SPLICED
    if not status.splices and spliced:
        allowed = status.splicing_allowed
        return _withdrawn(plan, Reason.UNSUPPORTED_RUNTIME if allowed else Reason.REPREFILLED)
    if recurrent is RecurrentEdits.EXACT and (spliced or plan.lineage):
        return replace(_withdrawn(plan, Reason.RECURRENT_STATE), lineage=())
    return plan


def _withdrawn(plan: TurnPlan, reason: Reason) -> TurnPlan:
    # Forgetting isn't a splice: demands remain.
    forgets = tuple(d for d in plan.directives if d.mode is Mode.FORGET)
    return replace(
        plan,
        sources=plan.sources if forgets else (),
        directives=forgets,
        segments=(LiteralSegment(0, plan.segments[-1].dest_end),) if forgets else (),
        planned=Outcome.REPREFILLED,
        reason=reason,
        reusable_tokens=0,
    )


def _with_uncached(plan: TurnPlan, prepared: Prepared, session: Session | None) -> TurnPlan:
    """Return the plan with records of edits that no cached turn shows."""
    found = uncached_edits(prepared, session, plan.edits)
    if not found.listed and not found.standing:
        return plan
    outcome, reason = plan.planned, plan.reason
    if outcome is Outcome.UNEDITED:
        outcome = Outcome.EDITED
        reason = Reason.NOTHING_CACHED if found.listed else Reason.STANDING
    return replace(
        plan,
        edits=plan.edits + found.listed,
        omitted=found.omitted,
        standing=found.standing,
        planned=outcome,
        reason=reason,
    )


def edited_by_messages(last: RetainedTurn | None, prepared: Prepared) -> tuple[EditRecord, ...]:
    """Return the changes since ``last`` in the common part, as far as messages show them.

    This is the account for an engine with unknown tokens: no spans, no counts.
    """
    if last is None:
        return ()
    steps = diff_messages(last.prepared.messages, prepared.messages).steps
    records: list[EditRecord] = []
    for step in steps:
        if step.old is None or step.kind == "kept":
            continue
        before = last.prepared.sent[step.old]
        index = prepared.sent[step.new].client_index if step.new is not None else None
        cause, mode = _change(prepared, step.new, before.client_index)
        records.append(
            EditRecord(
                message=index,
                role=str(before.message.get("role", "")),
                cause=cause,
                mode=mode,
                span=None,
                replacement_tokens=0,
            )
        )
    return tuple(records)


def _change(prepared: Prepared, sent: int | None, client: int | None) -> tuple[str, Any]:
    if sent is not None and prepared.sent[sent].changes:
        change = prepared.sent[sent].changes[-1]
        return change.cause, change.mode.value
    for dropped in prepared.dropped:
        if sent is None and dropped.client_index == client:
            return dropped.change.cause, dropped.change.mode.value
    return "undeclared", "exact"


def _located(given: PlanInput, prepared: Prepared, tokens: Sequence[int]) -> Rendered | None:
    renderer = given.status.rendering.renderer
    if renderer is None:
        return None
    try:
        read = renderer.read_by(given.request.reader)
        return read.locate(array("q", tokens), prepared.messages, given.request.body)
    except Exception as error:  # the request is served without a plan
        log.warning("locate_failed", error=type(error).__name__)
        return None


def _named(
    given: PlanInput, prepared: Prepared, rendered: Rendered | None
) -> tuple[SpanNames, tuple[str, ...]]:
    """Return the names of this turn's messages and those to forget."""
    departed = given.session.departed if given.session is not None else Departed()
    names = name_spans(given.turn, prepared, given.retained, departed, rendered)
    found = spans_to_forget(given.turn, prepared, names, given.session, named=given.named)
    return names, all_to_forget(given.demanded, found)


def _synthesize(
    given: PlanInput,
    prepared: Prepared,
    rendered: Rendered | None,
    names: SpanNames,
    forget: tuple[str, ...],
) -> TurnPlan:
    if rendered is None:
        return _unrendered(given, prepared, forget)
    plan = synthesize(
        # A forget binds wherever the text is.
        given.retained if prepared.forget_marks else given.comparable,
        prepared,
        rendered,
        given.rules,
        names=names,
        forget=forget,
        model_fingerprint=given.status.retains_as,
        model=given.request.computed_by,
        sink=sink_of(given.status),
        recompute=_recompute(given),
        decode=decode_of(given.status),
        overhead=splice_overhead(given.status.capability),
    )
    return _with_lost_sources(given, prepared, plan)


def decode_of(status: UpstreamStatus) -> Decode | None:
    """Return the decoder of an engine's tokens; None if its tokenizer isn't known."""
    renderer = status.rendering.renderer
    return renderer.decode if renderer is not None else None


def _recompute(given: PlanInput) -> Recompute:
    """Return the tokens after edits to compute again: as the request says, or the profile."""
    profile, boundary = given.status.profile, given.request.options.boundary
    if boundary is not None:
        return Recompute(boundary)
    return profile.recompute if profile is not None else Recompute()


def _with_lost_sources(given: PlanInput, prepared: Prepared, plan: TurnPlan) -> TurnPlan:
    """Return the plan with records of edits that no source shows, because the earlier turns were on
    another engine or an earlier run of this one, or of another adapter."""
    last = given.last
    if last is None or plan.edits:
        return plan
    if (last.model_fingerprint, last.model) == (given.status.retains_as, given.request.computed_by):
        return plan
    edits = edited_by_messages(last, prepared)
    if not edits:
        return plan
    spliceable = any(record.mode == "amortize" for record in edits)
    reason = Reason.MISSING_SOURCE if spliceable else Reason.REPREFILLED
    return replace(plan, edits=edits, planned=Outcome.REPREFILLED, reason=reason)


def _failed(given: PlanInput, prepared: Prepared) -> TurnPlan:
    """Return a plan that keeps the demands; the names are unknown, so everything is forgotten."""
    return TurnPlan(
        forget=(ANYTHING,) if prepared.forget_marks or given.demanded else (),
        edits=edited_by_messages(given.last, prepared),
        planned=Outcome.REPREFILLED,
        reason=Reason.TRANSFORM_FAILED,
    )


def _unrendered(given: PlanInput, prepared: Prepared, forget: tuple[str, ...]) -> TurnPlan:
    edits = edited_by_messages(given.last, prepared)
    if not edits and forget:
        edits = demands_of(prepared)
    if not edits:
        return TurnPlan(forget=forget)
    spliceable = any(record.mode == "amortize" for record in edits)
    reason = Reason.UNSUPPORTED_RUNTIME if spliceable else Reason.REPREFILLED
    return TurnPlan(forget=forget, edits=edits, planned=Outcome.REPREFILLED, reason=reason)


def _too_long(plan: TurnPlan) -> TurnPlan:
    """Return the plan of a prompt without tokens, with the reason that it has none."""
    if plan.reason is not Reason.UNSUPPORTED_RUNTIME:
        return plan
    return replace(plan, reason=Reason.PROMPT_TOO_LONG)


def sink_of(status: UpstreamStatus) -> int:
    """Return the number of leading positions always computed again; the engine may give its own."""
    return (status.capability.sink if status.capability else 0) or ATTENTION_SINK
