"""The interface of stores of evicted texts.

A text belongs to a session of a tenant. Another session, or another tenant, doesn't find it, even
by the right address.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from ..model.parts import FoundParts, PartFacts, StoredPart

Owner = tuple[str, str]
"""Tenant and session."""


class PartStoreError(Exception):
    """A store that can't be used now; the message names no text and no key."""


class PartStore(Protocol):
    """A bounded store of evicted texts, fair among tenants."""

    @property
    def problem(self) -> str | None:
        """The reason that the store can't be used now, for ``/readyz``; None if it can."""

    async def put(self, owner: Owner, parts: Sequence[StoredPart]) -> None:
        """Store texts, or renew those that are stored already.

        Texts of turns that a forget reaches (see :meth:`forget`) are left out. Texts that exceed
        the store's limits take the place of their tenant's oldest, or are left out.

        Raises:
            PartStoreError: nothing, or not everything, was stored.
        """

    async def get(self, owner: Owner, addresses: Collection[str]) -> FoundParts:
        """Return the state of addresses.

        Raises:
            PartStoreError: it can't be read.
        """

    async def listed(self, owner: Owner) -> Sequence[PartFacts]:
        """Return what a session has, oldest first; at most ``MAX_LISTED``.

        Raises:
            PartStoreError: it can't be read.
        """

    async def forget(self, owner: Owner, *, turn: str, demands: int) -> int:
        """Remove a session's texts, remember that they were forgotten, and return their number.

        Concurrent turns that were planned before may still put: what they put is left out, too.

        Args:
            turn: the turn that demands it; what it puts itself is kept. Empty if no turn does.
            demands: the session's demands before. Texts of turns with more are kept.

        Raises:
            PartStoreError: not everything is known to be gone.
        """

    async def held(self, owner: Owner, demands: int) -> tuple[int, int]:
        """Return the number of a tenant's texts, and of those that a forget should have reached.

        Args:
            demands: the session's demands after the forget.

        Raises:
            PartStoreError: it can't be read.
        """

    async def aclose(self) -> None:
        """Close connections."""
