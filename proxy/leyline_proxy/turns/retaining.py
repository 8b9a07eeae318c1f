"""A session's state before and after a turn. Pure."""

from __future__ import annotations

from dataclasses import replace

from leyline_engine.contract import Reason

from ..model.asides import MAX_ASIDES
from ..model.forgotten import without_old_lists, without_written
from ..model.places import all_owed
from ..model.session import RetainedTurn, Session, TurnSummary
from ..model.spans import ANYTHING
from ..model.verdicts import with_verdicts
from ..plan.derivation import readings_after
from ..request.client_name import client_name
from ..request.identify import NAMED
from ..request.tool_order import tools_after
from .placing import Placing
from .questions import is_same
from .settled import SettledTurn
from .turn import Turn

MAX_COMPLETIONS = 8
"""Largest number of a session's texts that models wrote for policies."""


_MAX_MODEL = 120
"""Characters of a model's name that a session keeps."""


class SessionGoneError(Exception):
    """The session that a text is written for has expired meanwhile."""


def known(session: Session | None) -> Session:
    """Return the session. Raises SessionGoneError if it has expired."""
    if session is None:
        raise SessionGoneError
    return session


def with_completion(session: Session, key: str, text: str) -> Session:
    """Return the session with a text that a model wrote for a policy."""
    kept = {**session.completions, key: text}
    return replace(session, completions=dict(list(kept.items())[-MAX_COMPLETIONS:]))


def session_after(
    session: Session | None, settled: SettledTurn, placing: Placing, *, keep: int, now: float
) -> Session:
    """Return the session with a settled turn.

    The session may have changed since the plan was made: another request of it ran at the same
    time. Both are kept, under consecutive numbers.

    Args:
        session: its current state; None if it begins with this turn.
        keep: number of turns that stay as sources.
        now: seconds since the epoch.

    Raises:
        SessionGoneError: a policy asked, and the session that waits for the answer has expired.
    """
    turn, receipt = settled.turn, settled.receipt
    # An answer for a policy may hold what was to be forgotten meanwhile.
    source, written = (settled.source, settled.written) if _fits(session, turn) else (None, None)
    plan = turn.planned.plan
    # After the forget that it confirms, the engine may have received what others read.
    obeyed = settled.obeyed and not _is_overtaken(session, turn)
    current = _with_name(session or _new_session(turn, placing, now), turn)
    if current.key == NAMED != turn.identity.key:
        source = None  # the session got its name meanwhile, and this turn may be another's
    if turn.identity.retells:
        current = replace(current, unvouched=True)
        if current.demands > turn.demands:
            source = None  # the transcript may have what was forgotten meanwhile
    if plan.forgets:
        current = without_written(current)
    if settled.record is not None and plan.forgets:
        current = current.forget_sources()
        if ANYTHING in plan.forget and settled.obeyed:
            current = current.account_for(turn.unnamed)
    if source is not None and plan.retire:
        current = current.without(plan.retire)  # so does the engine
    if receipt.reason is Reason.MISSING_SOURCE:
        current = current.without({ref.turn for ref in plan.sources})
    if turn.enveloped and source is None:
        current = current.lose_turn()
    if not turn.enveloped:
        # The next turn gives new names to messages of a turn that isn't retained.
        current = _untraced(current, current.next_index + (1 if source is not None else 2))
    current = placing.after(current, turn, settled.run, obeyed=obeyed)
    index = current.next_index
    kept = replace(source, index=index) if source is not None else None
    if kept is not None:
        current = without_old_lists(current, kept)
    current = replace(current, tools=tools_after(current.tools, turn.request))
    current = _with_readings(current, settled, kept)
    overtaken = session is not None and session.demands > turn.demands
    current = _with_recalls(_with_policies(current, turn, written), settled, overtaken=overtaken)
    return current.retain(kept, _summary(settled, index, now), keep=keep, now=now)


def _summary(settled: SettledTurn, index: int, now: float) -> TurnSummary:
    turn, plan = settled.turn, settled.turn.planned.plan
    return TurnSummary(
        index=index,
        turn=turn.name,
        created=now,
        edits=plan.edits,
        receipt=settled.receipt,
        planned=plan.planned,
        reason=plan.reason,
        paid=settled.paid,
        model=turn.request.model[:_MAX_MODEL],
        client=client_name(turn.request.headers),
    )


def session_without(
    session: Session | None, turn: Turn, placing: Placing, *, now: float
) -> Session:
    """Return the session with a turn that went to the engine and won't be settled.

    Args:
        session: its current state; None if it begins with this turn.
        now: seconds since the epoch.
    """
    current = _with_verdicts(session or _new_session(turn, placing, now), turn)
    # A part of its answer may have reached the client.
    current = replace(current, readings=current.readings.lose(current.next_index))
    if not turn.enveloped:
        current = _untraced(current, current.next_index + 1)
        return _all_owing(current, turn, placing) if turn.planned.plan.forgets else current
    if turn.planned.plan.forgets:
        current = without_written(current.forget_sources())
    return placing.after(current.lose_turn(), turn, turn.status.retains_as, obeyed=False)


def session_owing(session: Session | None, turn: Turn, placing: Placing, *, now: float) -> Session:
    """Return the session with a demand that no engine received, or that one turned away unread.

    Args:
        session: its current state; None if it begins with this turn.
        now: seconds since the epoch.
    """
    current = _with_verdicts(session or _new_session(turn, placing, now), turn)
    return _all_owing(current, turn, placing)


def _all_owing(session: Session, turn: Turn, placing: Placing) -> Session:
    """Return the session with a demand that no recipient of the turn can confirm."""
    places = all_owed(placing.known(session.places, turn))
    left = without_written(session.forget_sources())
    return replace(left, places=places, demands=session.demands + 1)


def _with_name(session: Session, turn: Turn) -> Session:
    """Return the session under the name that the turn's request gave it, if any."""
    if turn.identity.name:
        session = replace(session, name=turn.identity.name)
    if turn.identity.key == NAMED:
        session = session.take_name(NAMED, turn.planned.prepared.client_fingerprints)
    return session


def _new_session(turn: Turn, placing: Placing, now: float) -> Session:
    return Session(
        id=turn.identity.session_id,
        tenant=turn.request.tenant.name,
        key=turn.identity.key,
        turns=(),
        history=(),
        next_index=0,
        updated=now,
        created=now,
        unnamed=turn.unnamed,
        unvouched=turn.unvouched,
        untraced=turn.untraced,
        name=turn.identity.name,
        # For a conversation from elsewhere, any engine may hold some of its KV.
        places=placing.anywhere() if turn.unvouched else {},
    )


def _is_overtaken(session: Session | None, turn: Turn) -> bool:
    """Return True if other turns of the session have ended since the turn was planned.

    Args:
        session: its state when the turn ends.
    """
    if session is None:
        return False
    return session.next_index > turn.index or session.unnamed > turn.unnamed


def _untraced(session: Session, before: int) -> Session:
    """Return the session with messages before that turn given to an engine without a name."""
    return replace(session, untraced=max(session.untraced, before))


def _with_verdicts(session: Session, turn: Turn) -> Session:
    """Return the session with the verdicts on the turn's messages."""
    if not turn.planned.verdicts:
        return session
    return replace(session, verdicts=with_verdicts(session.verdicts, turn.planned.verdicts))


def _with_readings(session: Session, settled: SettledTurn, source: RetainedTurn | None) -> Session:
    """Return the session with what the turn's answer had read."""
    turn = settled.turn
    return readings_after(
        session,
        turn.name,
        turn.planned.prepared,
        turn.planned.names,
        # Without a receipt, nobody knows what the engine copied. A transcript's texts have other
        # names.
        hidden=bool(settled.receipt.lineage)
        or (turn.enveloped and settled.record is None)
        or turn.identity.retells,
        retained=source is not None,
        answers=source is not None and bool(source.output_ids),
        key=turn.asks.key if turn.asks is not None else "",
    )


def _with_recalls(session: Session, settled: SettledTurn, *, overtaken: bool) -> Session:
    """Return the session with the asides of the turn, and the one that follows it.

    Args:
        overtaken: True if a forget was demanded since the turn was planned: the model may have read
            the text.
    """
    last = (settled.aside,) if settled.aside is not None else ()
    new = (*settled.turn.appended, *last)
    recalled = session.recalled or settled.turn.planned.prepared.recalls or bool(new)
    if overtaken:
        new = ()
    if not new and recalled == session.recalled:
        return session
    return replace(session, asides=(*session.asides, *new)[-MAX_ASIDES:], recalled=recalled)


def _with_policies(session: Session, turn: Turn, written: str | None) -> Session:
    """Return the session with what policies leave for its next turn.

    Args:
        written: the answer to the turn's question, if a policy asked.
    """
    if turn.asks is not None:
        return session if written is None else with_completion(session, turn.asks.key, written)
    if turn.identity.retells:
        return _with_verdicts(session, turn)  # they have not seen the session's own list
    prepared = turn.planned.prepared
    # Texts that they no longer ask for go.
    kept = {key: text for key, text in session.completions.items() if key in prepared.used}
    session = replace(session, policy_states=prepared.states, completions=kept)
    return _with_verdicts(session, turn)


def _fits(session: Session | None, turn: Turn) -> bool:
    """Return True if a turn's answer may become a part of the session.

    Raises:
        SessionGoneError: a policy asked, and the session has expired.
    """
    before = turn.identity.session
    return turn.asks is None or (before is not None and is_same(known(session), before))
