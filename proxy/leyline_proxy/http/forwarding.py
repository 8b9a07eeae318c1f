"""A turn's chat request on its way to its engine."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

import httpx

from ..turns.turn import Turn
from ..upstream.headers import RawHeaders
from ..wiring.services import Services
from .chat import CHAT


def own_headers(services: Services, turn: Turn) -> list[tuple[bytes, bytes]]:
    """Return the proxy's own headers of a turn: the session's id for a router, if that is set."""
    header = services.settings.affinity_header
    if not header:
        return []
    return [(header.encode("latin-1"), turn.identity.session_id.encode())]


def open_chat(
    services: Services, turn: Turn, headers: RawHeaders
) -> AbstractAsyncContextManager[httpx.Response]:
    """Send a turn to its engine.

    Args:
        headers: the client's, for the engine.
    """
    return turn.replica.forward(
        "POST",
        CHAT.path,
        headers=headers,
        content=turn.body,
        own=own_headers(services, turn),
        credentials=turn.request.tenant.forward_credentials,
    )
