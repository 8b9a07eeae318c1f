"""Reports on budgets that cover all workers, also while their store is down."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import msgspec

from ..budgets import Budgets
from ..model.budgets import Asked, Counted, Standing, StoreState, standings, together
from ..tenants import Tenant
from .fleet import Fleet

_COUNTED = "budgets.counted"
_STATE = "budgets.state"
_PATIENCE_S = 1.0


class BudgetsOfAll:
    """The :class:`~leyline_proxy.budgets.BudgetReports` of one worker and of all others."""

    def __init__(self, own: Budgets, fleet: Fleet) -> None:
        self._own = own
        self._fleet = fleet
        fleet.follow(_COUNTED, self._counted_here)
        fleet.follow(_STATE, self._state_here)

    async def standings(self, tenant: Tenant) -> list[Standing]:
        if not tenant.limits.budgets:
            return []
        asked = self._own.asked(tenant)
        usages = await self._own.read(asked)
        if usages is None:
            found = await self._all(_COUNTED, msgspec.msgpack.encode(asked))
            counts = [_COUNTS.decode(each) for each in found] or [self._own.counted(asked)]
            usages = together(counts)
        return standings(asked, usages)

    async def state(self) -> StoreState:
        found = [_STATES.decode(each) for each in await self._all(_STATE)]
        found = found or [await self._own.state()]
        problems = (each.problem for each in found if each.problem is not None)
        return StoreState(next(problems, None), sum(each.owed for each in found))

    async def _all(self, order: str, body: bytes = b"") -> list[bytes]:
        """Return all workers' answers; none if one of them is busy for too long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                return await self._fleet.everyone(order, body)
        return []

    async def _counted_here(self, body: bytes) -> bytes:
        return msgspec.msgpack.encode(self._own.counted(_ASKED.decode(body)))

    async def _state_here(self, _: bytes) -> bytes:
        return msgspec.msgpack.encode(await self._own.state())


_ASKED = msgspec.msgpack.Decoder(Asked)
_COUNTS = msgspec.msgpack.Decoder(tuple[Counted, ...])
_STATES = msgspec.msgpack.Decoder(StoreState)
