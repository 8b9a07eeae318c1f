"""The memories of this process that hold prompt text, in one place: forgets and proofs reach all.

Each only saves work, so dropping an entry is always right. Whoever adds a memory of prompt text
gives it to :class:`PromptMemories`; a test searches the process for others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from leyline_engine.contract import ProofPlace

from ..model.text_memory import Left
from ..render import ChatRenderer
from ..upstream.pool import ReplicaPool
from .ports import KeptText


class PromptMemory(Protocol):
    """A memory whose entries are of sessions."""

    def forget(self, tenant: str, session: str, demands: int | None) -> None:
        """Drop a session's entries.

        Args:
            demands: only those of turns planned after at most so many demands; None for all.
        """

    def left(self, tenant: str, session: str, demands: int) -> Left:
        """Return the number of a session's entries.

        Args:
            demands: the session's demands after its forget.
        """


class PromptMemories:
    """A :class:`~.ports.KeptText` of all memories of this process.

    Args:
        memories: by the names of their places in proofs.
    """

    def __init__(self, memories: Mapping[str, PromptMemory]) -> None:
        self.memories = memories

    async def forget(self, tenant: str, session: str, turn: str, demands: int) -> None:
        """Drop all that turns of before a demand have left."""
        for memory in self.memories.values():
            memory.forget(tenant, session, demands)

    async def delete(self, tenant: str, session: str) -> None:
        """Drop all of a session that is deleted."""
        for memory in self.memories.values():
            memory.forget(tenant, session, None)

    async def left(self, tenant: str, session: str, demands: int) -> Sequence[ProofPlace]:
        """Look for entries of a session."""
        found = {name: each.left(tenant, session, demands) for name, each in self.memories.items()}
        return [
            ProofPlace(place=name, scanned=sum(each), survivors=each.before, sent_again=each.again)
            for name, each in found.items()
        ]


class RenderedTexts:
    """The texts and tokens that the renderers of all engines remember."""

    def __init__(self, pool: ReplicaPool) -> None:
        self._pool = pool

    def forget(self, tenant: str, session: str, demands: int | None) -> None:
        """Drop a session's texts in each renderer."""
        for renderer in self.renderers():
            renderer.forget(tenant, session, demands)

    def left(self, tenant: str, session: str, demands: int) -> Left:
        """Return the number of a session's texts in all renderers."""
        found = (each.left(tenant, session, demands) for each in self.renderers())
        return sum(found, Left())

    def renderers(self) -> Iterator[ChatRenderer]:
        """Yield each engine's renderer."""
        for replica in self._pool:
            if (renderer := replica.status.rendering.renderer) is not None:
                yield renderer


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
