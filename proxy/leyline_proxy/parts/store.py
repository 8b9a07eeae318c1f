"""The interface of stores of evicted texts.

A text belongs to a session of a tenant. Another session, or another tenant, doesn't find it, even
by the right address.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..model.parts import Barred, FoundParts, PartFacts, StoredPart

Owner = tuple[str, str]
"""Tenant and session."""

MAX_LISTED = 256
"""Texts of a session that are listed: the newest."""

MAX_PARTS = 1024
"""Texts that one session may have; of more, the oldest go."""

MAX_FORGOTTEN = 4096
"""Forgotten addresses that one session remembers. Of those that were removed, the oldest go; beyond
so many that are barred, all are."""

FLOOR_S = 3600.0
"""Time for which a forget refuses texts of turns that were planned before it; longer than any turn
takes."""


class PartStoreError(Exception):
    """A store that can't be used now; the message names no text and no key."""


@dataclass(frozen=True, slots=True)
class PartLimits:
    """Limits of a store."""

    ttl_s: float = 86_400.0
    """Time for which a text is kept after its last put."""
    tenant_bytes: int = 64 << 20
    """Size of one tenant's texts as they are stored."""
    part_bytes: int = 4 << 20
    """Size of one text as it is stored."""


@dataclass(frozen=True, slots=True)
class PartUsage:
    """The contents of a store in this process."""

    entries: int = 0
    bytes: int = 0


class PartStore(Protocol):
    """A bounded store of evicted texts, fair among tenants."""

    @property
    def name(self) -> str:
        """Kind of the store: ``memory``, ``redis`` or ``files``."""

    @property
    def problem(self) -> str | None:
        """The reason that the store can't be used now, for ``/readyz``; None if it can."""

    @property
    def usage(self) -> PartUsage:
        """The contents in this process; none if they are kept elsewhere."""

    async def check(self) -> None:
        """Find out if the store can be used, for :attr:`problem`. Never raises."""

    async def tidy(self) -> None:
        """Remove what has expired. Never raises."""

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
        """Return what a session has, oldest first; of more than ``MAX_LISTED``, the newest.

        Raises:
            PartStoreError: it can't be read.
        """

    async def forget(self, owner: Owner, *, turn: str, demands: int) -> int:
        """Remove a session's texts, remember that they were forgotten, and return their number.

        Concurrent turns that were planned before may still put: what they put within ``FLOOR_S``
        is left out, too.

        Args:
            turn: the turn that demands it; what it puts itself is kept. Empty if no turn does.
            demands: the session's demands before. Texts of turns with more are kept.

        Raises:
            PartStoreError: not everything is known to be gone.
        """

    async def bar(self, owner: Owner, addresses: Collection[str] | None) -> None:
        """Remove a session's texts that have or hold these addresses, and refuse them from now on,
        whichever turn puts them. The session's puts renew the refusal.

        Args:
            addresses: None for all texts; also beyond ``MAX_FORGOTTEN`` all are refused.

        Raises:
            PartStoreError: not everything is known to be gone.
        """

    async def barred(self, owner: Owner) -> Barred:
        """Return the addresses that a session refuses.

        Raises:
            PartStoreError: it can't be read.
        """

    async def delete(self, owner: Owner) -> int:
        """Remove a session's texts and what it remembers of forgotten ones; return their number.

        What turns put that were planned before is left out. A new session of the same name may
        put.

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
