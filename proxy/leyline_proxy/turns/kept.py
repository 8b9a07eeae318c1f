"""Several places with prompt text, as one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from leyline_engine.contract import ProofPlace

from .ports import KeptText


class KeptTexts:
    """A :class:`~.ports.KeptText` of several."""

    def __init__(self, *places: KeptText) -> None:
        self._places = places

    async def forget(self, tenant: str, session: str, turn: str, demands: int) -> None:
        """Remove all of a session from each place."""
        await asyncio.gather(
            *(place.forget(tenant, session, turn, demands) for place in self._places)
        )

    async def delete(self, tenant: str, session: str) -> None:
        """Remove all of a deleted session from each place."""
        await asyncio.gather(*(place.delete(tenant, session) for place in self._places))

    async def left(self, tenant: str, session: str, demands: int) -> Sequence[ProofPlace]:
        """Look for a session's text in each place."""
        found = await asyncio.gather(
            *(place.left(tenant, session, demands) for place in self._places)
        )
        return [each for places in found for each in places]
