"""``truncation: auto``: drop old messages until the engine takes the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ..apis.responses.truncation import Unit, droppable, with_dropped
from ..errors import UnsupportedError
from ..plan.draft import LongPromptError
from ..request.parse import ChatRequest, parse_chat
from ..upstream.tokens import TokensRefusedError
from ..wiring.services import Services

_LEAST_ANSWER = 1024
_ANSWER_SHARE = 8
"""Room for an answer of no stated length: so many tokens, or that fraction of the window."""


async def fitting(services: Services, chat: ChatRequest, body: Mapping[str, Any]) -> ChatRequest:
    """Return the request with as few of its oldest messages dropped as needed to make it fit.

    A request that fits stays as it is. So does one that can't be counted; the engine then decides.

    Args:
        body: the source of ``chat``.

    Raises:
        NotFoundError: no engine serves the model.
        BadRequestError, ForbiddenError: the request's ``leyline`` options are wrong.
    """
    window = _window(services, chat)
    if window is None:
        return chat
    limit = body.get("max_tokens")
    room = limit if isinstance(limit, int) else min(_LEAST_ANSWER, window // _ANSWER_SHARE)
    if len(chat.raw) + room <= window:
        # A token is a byte at least, so there is nothing to count.
        return chat
    units = droppable(chat.messages)
    try:
        if await _fits(services, chat, window - room) or not units:
            return chat
        # Find the fewest units that are enough, or all of them.
        few, many = 1, len(units)
        while few < many:
            middle = (few + many) // 2
            fits = await _fits(services, _without(chat, body, units[:middle]), window - room)
            few, many = (few, middle) if fits else (middle + 1, many)
    except (UnsupportedError, TokensRefusedError):
        return chat
    return _without(chat, body, units[:few])


def _without(chat: ChatRequest, body: Mapping[str, Any], units: list[Unit]) -> ChatRequest:
    raw = msgspec.json.encode(with_dropped(body, units))
    return parse_chat(raw, chat.headers, chat.tenant, clock=chat.clock)


async def _fits(services: Services, chat: ChatRequest, room: int) -> bool:
    """Return True if a request's prompt has at most so many tokens."""
    try:
        counted = await services.turns.count_prompt(chat)
    except LongPromptError:
        return False
    return int(counted["input_tokens"]) <= room


def _window(services: Services, chat: ChatRequest) -> int | None:
    """Return the smallest window of the engines that may serve the request."""
    allowed = chat.tenant.upstreams
    known = [
        replica.status.capability.max_context
        for replica in services.pool
        if (allowed is None or replica.name in allowed)
        and replica.status.serves(chat.model)
        and replica.status.capability is not None
    ]
    return min(known, default=None)
