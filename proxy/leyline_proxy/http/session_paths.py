"""The session that a path names: by its id, or by the caller's own name of it."""

from __future__ import annotations

from collections.abc import Callable

from ..request.session_name import public_id
from ..settings.proxy import secret_of
from ..wiring.services import Services


def stored_id(services: Services) -> Callable[[str], str]:
    """Return a function from a path's ``session_id`` to the session's id: a dependency of routes.

    A name with a slash can't be in a path; its id can.
    """
    secret = secret_of(services.settings.hints_secret)

    def found(session_id: str) -> str:
        return public_id(session_id, secret)

    return found
