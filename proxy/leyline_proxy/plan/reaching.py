"""The parts of a prompt that the session has had before, on any engine. Pure."""

from __future__ import annotations

from dataclasses import replace

from leyline_engine.contract import Recompute

from ..model.session import RetainedTurn
from ..model.spans import SpanNames
from ..render import steering_digest
from .candidates import consider, quoting
from .plan_input import PlanInput
from .planning import Planned, decode_of, edited_by_messages
from .quotes import find_quotes
from .reach import Moved, Reach, reach_by_messages, reach_of


def with_reach(given: PlanInput, planned: Planned) -> Planned:
    """Return the plan with its prompt's reach.

    The plan itself considers only turns that the engine in use can hold. This adds turns that are
    on another engine, were lost with a run of this one, or have unknown tokens.
    """
    names, status = planned.names, given.status
    blind = planned.rendered is None and status.capability is None
    context = steering_digest(given.request.body) if blind else ""
    last, moved = _nearest(given)
    if names is None or last is None:
        return _with(planned, Reach(context=context)) if blind else planned
    here = last.replica == given.replica and last.model_fingerprint == status.retains_as
    if not moved and here and not blind:
        return planned
    if not moved and not here:
        moved = "engine" if last.replica == given.replica else "failover"
    # Another model may have another tokenizer.
    if last.rendered.tokens and (moved != "model" or here):
        return planned if blind else _with(planned, _compared(given, planned, names, last, moved))
    context = context or steering_digest(given.request.body)
    told = blind and last is given.last  # from the plan, which also has only messages
    edits = planned.plan.edits if told else edited_by_messages(last, planned.prepared)
    first = edits[0].cause if edits else ""
    return _with(planned, reach_by_messages(last, planned.prepared, first, context, moved))


def _nearest(given: PlanInput) -> tuple[RetainedTurn | None, Moved]:
    """Return the retained turn to compare with: of this model, of the session, or of the one that
    it continues under another id."""
    model = given.request.computed_by
    own = next((turn for turn in reversed(given.comparable) if turn.model == model), None)
    if own is not None:
        return own, ""
    if given.last is not None:
        return given.last, "model"
    before = given.before.turns if given.before is not None else ()
    return next((turn for turn in reversed(before) if turn.model == model), None), "session"


def _compared(
    given: PlanInput, planned: Planned, names: SpanNames, last: RetainedTurn, moved: Moved
) -> Reach:
    if planned.rendered is None:
        return Reach()
    turns = [turn for turn in given.retained if turn.model == last.model]
    quotes = find_quotes(turns, planned.rendered, planned.prepared.sent_fingerprints)
    found = consider(
        last,
        planned.prepared,
        planned.rendered,
        given.rules,
        names,
        recompute=Recompute(),
        decode=decode_of(given.status),
        quotes=quotes,
    )
    return reach_of(found, moved, quoting(turns, quotes))


def _with(planned: Planned, reach: Reach) -> Planned:
    return replace(planned, plan=replace(planned.plan, reach=reach))
