"""Dependencies of routes besides the turns': the caller, and the session that a path names."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import Request

from ..request.parse import decode_body
from ..request.session_name import public_id
from ..settings.proxy import secret_of
from ..tenants import Tenant
from ..wiring.services import Services
from .caller import caller_of
from .limits import read_body

SideCaller = Callable[[Request], AsyncIterator[Tenant]]


def side_caller(services: Services) -> SideCaller:
    """Return a dependency that gives a request's tenant, and holds a place for the request.

    These places aren't the turns': a tenant whose turns wait can still release a claim, or put a
    message into quarantine.
    """

    async def caller(request: Request) -> AsyncIterator[Tenant]:
        tenant = await caller_of(services, request)
        async with services.side_places.place(tenant.name):
            yield tenant

    return caller


def stored_id(services: Services) -> Callable[[str], str]:
    """Return a function from a path's ``session_id`` to the session's id: a dependency of routes.

    A name with a slash can't be in a path; its id can.
    """
    secret = secret_of(services.settings.hints_secret)

    def found(session_id: str) -> str:
        return public_id(session_id, secret)

    return found


async def side_body(
    services: Services, request: Request, most: int, way_out: str
) -> dict[str, Any]:
    """Return the JSON object that a request has as its body.

    Args:
        most: bytes that it may have, besides the proxy's own limit.
        way_out: a sentence for one that has more.

    Raises:
        BadRequestError: it is too long, or no object.
    """
    limit, timeout_s = min(services.settings.max_body_bytes, most), services.settings.body_timeout_s
    return decode_body(await read_body(request, limit, way_out, timeout_s=timeout_s))
