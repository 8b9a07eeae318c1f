"""A turn's chat request on its way to its engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from ..turns.turn import Turn
from ..upstream.headers import RawHeaders
from ..wiring.services import Services
from .chat import CHAT


@asynccontextmanager
async def open_chat(
    services: Services, turn: Turn, headers: RawHeaders
) -> AsyncIterator[httpx.Response]:
    """Send a turn to its engine, through the router if there is one.

    Args:
        headers: the client's, for the engine.
    """
    async with turn.replica.forward(
        "POST",
        CHAT.path,
        headers=headers,
        content=turn.body,
        own=services.routing.headers(turn),
        credentials=turn.request.tenant.forward_credentials,
        routed=True,
    ) as response:
        services.routing.note(turn, response.headers)
        yield response
