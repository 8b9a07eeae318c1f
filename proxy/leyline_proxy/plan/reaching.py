"""The parts of a prompt that the session has had before, on any engine. Pure."""

from __future__ import annotations

from dataclasses import replace

from leyline_engine.contract import Recompute

from ..model.session import RetainedTurn
from ..model.spans import SpanNames
from ..render import steering_digest
from .busts import Moved, Reach, reach_by_messages, reach_of
from .candidates import consider
from .planning import PlanInput, Planned, decode_of, edited_by_messages


def with_reach(given: PlanInput, planned: Planned) -> Planned:
    """Return the plan with its prompt's reach.

    The plan itself considers only turns that the engine in use can hold. This adds turns that are
    on another engine, were lost with a run of this one, or have unknown tokens.
    """
    names, status = planned.names, given.status
    blind = planned.rendered is None and status.capability is None
    context = steering_digest(given.request.body) if blind else ""
    last = next((t for t in reversed(given.retained) if t.model == given.request.computed_by), None)
    if names is None or last is None:
        return _with(planned, Reach(context=context)) if blind else planned
    here = last.replica == given.replica and last.model_fingerprint == status.retains_as
    if here and not blind:
        return planned
    moved: Moved = "" if here else "engine" if last.replica == given.replica else "failover"
    if last.rendered.tokens:
        return planned if blind else _with(planned, _compared(given, planned, names, last, moved))
    context = context or steering_digest(given.request.body)
    told = blind and last is given.last  # from the plan, which also has only messages
    edits = planned.plan.edits if told else edited_by_messages(last, planned.prepared)
    first = edits[0].cause if edits else ""
    return _with(planned, reach_by_messages(last, planned.prepared, first, context, moved))


def _compared(
    given: PlanInput, planned: Planned, names: SpanNames, last: RetainedTurn, moved: Moved
) -> Reach:
    if planned.rendered is None:
        return Reach()
    found = consider(
        last,
        planned.prepared,
        planned.rendered,
        given.rules,
        names,
        recompute=Recompute(),
        decode=decode_of(given.status),
    )
    return reach_of(found, moved)


def _with(planned: Planned, reach: Reach) -> Planned:
    return replace(planned, plan=replace(planned.plan, reach=reach))
