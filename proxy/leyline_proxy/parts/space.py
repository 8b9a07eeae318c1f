"""The interface of places where named entries are kept: memory, Redis, a file system.

A space knows neither texts nor callers: see :mod:`.names`. Rules are in :mod:`.store`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from .names import Shelf


@dataclass(frozen=True, slots=True)
class PartUsage:
    """The contents of a space in this process."""

    entries: int = 0
    bytes: int = 0


class SpaceError(Exception):
    """A space that can't be used now, or refuses an operation. Its message names no entry."""


class Space(Protocol):
    """Entries by tenant and session. What one call has written, the next one of anyone reads.

    Every method but ``check`` and ``aclose`` raises SpaceError.
    """

    @property
    def name(self) -> str:
        """Kind of the space."""

    @property
    def problem(self) -> str | None:
        """The reason that the last operation failed; None if it didn't."""

    @property
    def usage(self) -> PartUsage:
        """The contents in this process."""

    async def check(self) -> None:
        """Find out if it can be used, for :attr:`problem`."""

    async def names(self, shelf: Shelf) -> Sequence[str]:
        """Return the names of a session's entries."""

    async def read(
        self, shelf: Shelf, names: Collection[str], most: int | None = None
    ) -> Mapping[str, bytes]:
        """Return entries, without those that don't exist.

        Args:
            most: bytes of each from its beginning; None for all.
        """

    async def write(self, shelf: Shelf, entries: Mapping[str, bytes], ttl_s: float) -> None:
        """Write entries of one kind, each wholly or not at all.

        Args:
            ttl_s: time after which the space may drop them.
        """

    async def remove(self, shelf: Shelf, names: Collection[str]) -> None:
        """Remove entries; those that don't exist are no error."""

    async def trim(self, tenant: str, kind: str, *, most: int, before: int) -> int:
        """Remove a tenant's oldest entries of a kind; return the bytes of those left.

        Args:
            tenant: the hash in its shelves.
            most: bytes that may stay.
            before: time in milliseconds; older entries go in any case.
        """

    async def count(self, tenant: str, since: int) -> int:
        """Return the number of a tenant's texts that were written since then, in milliseconds."""

    async def tidy(self, before: Mapping[str, int]) -> None:
        """Remove entries of all tenants.

        Args:
            before: by kind, the time in milliseconds of the oldest that stay.
        """

    async def aclose(self) -> None:
        """Close connections."""
