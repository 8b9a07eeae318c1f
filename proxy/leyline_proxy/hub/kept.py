"""Prompt text in each worker's memory, which a forget at one of them reaches everywhere."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from leyline_engine.contract import ProofPlace

from ..turns.ports import KeptText
from .fleet import Fleet

_FORGET = "kept.forget"
_LEFT = "kept.left"
_DELETE = "kept.delete"


class _Session(msgspec.Struct, array_like=True, frozen=True):
    tenant: str
    session: str
    turn: str = ""
    demands: int = 0


class KeptByAll:
    """A :class:`~leyline_proxy.turns.ports.KeptText` of one worker and of all others.

    Each method waits for every worker: one that can't answer ends, and its memory with it.
    """

    def __init__(self, own: KeptText, fleet: Fleet) -> None:
        self._own = own
        self._fleet = fleet
        fleet.follow(_FORGET, self._forget)
        fleet.follow(_LEFT, self._left)
        fleet.follow(_DELETE, self._delete)

    async def forget(self, tenant: str, session: str, turn: str, demands: int) -> None:
        await self._fleet.everyone(_FORGET, _packed(tenant, session, turn, demands))

    async def left(self, tenant: str, session: str, demands: int) -> Sequence[ProofPlace]:
        found = await self._fleet.everyone(_LEFT, _packed(tenant, session, "", demands))
        return [place for each in found for place in _PLACES.decode(each)]

    async def delete(self, tenant: str, session: str) -> None:
        """Drop all of a session that is deleted."""
        await self._fleet.everyone(_DELETE, _packed(tenant, session, "", 0))

    async def _forget(self, body: bytes) -> bytes:
        asked = _SESSION.decode(body)
        await self._own.forget(asked.tenant, asked.session, asked.turn, asked.demands)
        return b""

    async def _left(self, body: bytes) -> bytes:
        asked = _SESSION.decode(body)
        return msgspec.msgpack.encode(
            list(await self._own.left(asked.tenant, asked.session, asked.demands))
        )

    async def _delete(self, body: bytes) -> bytes:
        asked = _SESSION.decode(body)
        await self._own.delete(asked.tenant, asked.session)
        return b""


def _packed(tenant: str, session: str, turn: str, demands: int) -> bytes:
    return msgspec.msgpack.encode(_Session(tenant, session, turn, demands))


_SESSION = msgspec.msgpack.Decoder(_Session)
_PLACES = msgspec.msgpack.Decoder(list[ProofPlace])
