"""Prompt text in each worker's memory, which a forget at one of them reaches everywhere."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from leyline_engine.contract import ProofPlace

from ..turns.ports import KeptText
from .fleet import Fleet
from .wire import Method


class _Session(msgspec.Struct, array_like=True, frozen=True):
    tenant: str
    session: str
    turn: str = ""
    demands: int = 0


FORGET = Method("kept.forget", _Session, type(None))
LEFT = Method("kept.left", _Session, tuple[ProofPlace, ...])
DELETE = Method("kept.delete", _Session, type(None))


class KeptByAll:
    """A :class:`~leyline_proxy.turns.ports.KeptText` of one worker and of all others.

    Each method waits for every worker: one that can't answer ends, and its memory with it.
    """

    def __init__(self, own: KeptText, fleet: Fleet) -> None:
        self._own = own
        self._fleet = fleet
        fleet.follow(FORGET, lambda s: own.forget(s.tenant, s.session, s.turn, s.demands))
        fleet.follow(LEFT, self._left_here)
        fleet.follow(DELETE, lambda s: own.delete(s.tenant, s.session))

    async def forget(self, tenant: str, session: str, turn: str, demands: int) -> None:
        await self._fleet.everyone(FORGET, _Session(tenant, session, turn, demands))

    async def left(self, tenant: str, session: str, demands: int) -> Sequence[ProofPlace]:
        found = await self._fleet.everyone(LEFT, _Session(tenant, session, demands=demands))
        return [place for each in found for place in each]

    async def delete(self, tenant: str, session: str) -> None:
        """Drop all of a session that is deleted."""
        await self._fleet.everyone(DELETE, _Session(tenant, session))

    async def _left_here(self, asked: _Session) -> tuple[ProofPlace, ...]:
        return tuple(await self._own.left(asked.tenant, asked.session, asked.demands))
