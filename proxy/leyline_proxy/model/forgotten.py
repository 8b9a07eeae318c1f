"""A session's state after demands to forget, beyond its sources. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from .prepared import Prepared
from .session import RetainedTurn, Session


def without_written(session: Session) -> Session:
    """Return the session without texts that models wrote for nobody but Leyline: hidden turns of
    recalls, and policies' texts. They may have read what a forget is about, and no list of the
    client's has them."""
    if not (session.asides or session.completions):
        return session
    return replace(session, asides=(), completions={})


def has_lost(turns: Iterable[RetainedTurn], now: Prepared) -> bool:
    """Return True if a turn's list had a message to forget that a newer list lacks."""
    held = set(now.client_fingerprints)
    return any(not _to_forget(turn).issubset(held) for turn in turns)


def without_old_lists(session: Session, newest: RetainedTurn) -> Session:
    """Return the session without turns of before a turn that only hold text on to: those that a
    forget left without tokens, and those whose lists have messages to forget that its own lacks."""
    if newest.is_apart or newest.is_lone:
        return session
    held = set(newest.prepared.client_fingerprints)
    gone = [
        turn.turn
        for turn in session.turns
        if not turn.tokens or not _to_forget(turn).issubset(held)
    ]
    return session.without(gone) if gone else session


def _to_forget(turn: RetainedTurn) -> set[int]:
    """Return the fingerprints of a list's messages to forget."""
    prints = turn.prepared.client_fingerprints
    return {prints[place] for place in turn.prepared.forget_marks}
