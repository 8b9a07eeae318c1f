"""Callers of routes besides the turns': they ask stores and engines about a tenant's own state."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from fastapi import Request

from ..tenants import Tenant
from ..wiring.services import Services
from .caller import caller_of

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
