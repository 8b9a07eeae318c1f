"""Limits of the store of evicted texts."""

from __future__ import annotations

from dataclasses import dataclass

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
