"""The texts that are derived from what a turn forgets."""

from __future__ import annotations

from dataclasses import replace

from leyline_engine.contract import Outcome

from ..model.derived import Derived, derived_from
from ..model.prepared import Prepared
from ..model.readings import Readings
from ..model.session import Session
from ..model.spans import SpanNames
from .forgetting import fresh_marks
from .synthesis import TurnPlan


def derived_texts(
    plan: TurnPlan,
    prepared: Prepared,
    names: SpanNames | None,
    session: Session | None,
    *,
    turn: str,
    index: int,
) -> Derived | None:
    """Return the texts that are derived from what a turn forgets, its own answer among them; None
    if it forgets nothing.

    Args:
        plan: the turn's.
        names: of its messages; None if they aren't known, and neither are the texts then.
        turn: its name.
        index: its number.
    """
    if not plan.forgets and not plan.unreachable:
        return None
    if names is None:
        return Derived()
    before = session.readings if session is not None else Readings()
    # What is spliced now may have read texts, but nothing that is forgotten.
    hidden = plan.planned is Outcome.SPLICED
    readings = before.after(turn, index, prepared, names, hidden=hidden)
    marks = fresh_marks(turn, prepared, names, session) or tuple(prepared.forget_marks)
    standing = session.verdicts if session is not None else ()
    return derived_from(
        readings,
        {name for place in marks for name in names.client[place].all},
        names,
        also=demanded_names(prepared, names) | {name for each in standing for name in each.spans},
        now=index,
        kept=prepared.used,
        # A text that was recalled has been read under another name, too.
        certain=not (plan.unreachable or prepared.recalls)
        and not (session is not None and (session.in_flight or session.recalled)),
    )


def demanded_names(prepared: Prepared, names: SpanNames) -> set[str]:
    """Return the names of the messages that a turn's edits forget, now or since earlier turns."""
    return {names.client[place].id for place in prepared.forget_marks}


def readings_after(
    session: Session,
    turn: str,
    prepared: Prepared,
    names: SpanNames | None,
    *,
    hidden: bool,
    retained: bool,
    answers: bool,
    key: str = "",
) -> Session:
    """Return a session whose readings have a settled turn.

    Args:
        names: of the turn's messages; None if they aren't known.
        hidden: True if its KV may remember more than its prompt shows.
        retained: True if its messages keep their names.
        answers: True if its answer has a name.
        key: the policy's question that it answers; empty for an answer to the client.
    """
    index, readings = session.next_index, session.readings
    if names is not None:
        readings = readings.after(
            turn, index, prepared, names, hidden=hidden, answers=retained and answers, key=key
        ).forget(demanded_names(prepared, names))
    if not (retained and answers):
        readings = readings.lose(index if retained else index + 1)
    return replace(session, readings=readings)
