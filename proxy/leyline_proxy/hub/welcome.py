"""The hub's first words to a worker."""

from __future__ import annotations

import msgspec


class Welcome(msgspec.Struct, array_like=True, frozen=True):
    """State from before the worker came."""

    draining: tuple[str, ...] = ()
    """Engines that get no sessions."""
    claims: dict[str, int] = {}
    """Numbers of the newest claim events in the audit log, by run of an engine."""
