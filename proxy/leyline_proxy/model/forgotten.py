"""A session's state after demands to forget, beyond its sources. Pure."""

from __future__ import annotations

from dataclasses import replace

from .session import Session


def without_written(session: Session) -> Session:
    """Return the session without texts that models wrote for nobody but Leyline: hidden turns of
    recalls, and policies' texts. They may have read what a forget is about, and no list of the
    client's has them."""
    if not (session.asides or session.completions):
        return session
    return replace(session, asides=(), completions={})
