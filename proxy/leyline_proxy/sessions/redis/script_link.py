"""A link to a Redis that runs scripts, for stores whose entries need no care after an outage."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from .link import RedisLink, RedisOptions, StoreGoneError
from .scripts import Script

_RETRY_S = 1.0
"""Pause between two tries while Redis can't be reached."""


class ScriptLink:
    """Runs scripts, and looks for a Redis that was gone now and then.

    Args:
        whose: the store's name in the log.
    """

    def __init__(
        self, options: RedisOptions, whose: str, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._link = RedisLink(options, whose)
        self._monotonic = monotonic
        self._retry_at = 0.0

    async def run(self, script: Script, keys: Sequence[str], *arguments: object) -> Any:
        """Return a script's answer.

        Raises:
            StoreGoneError: Redis is out of reach.
        """
        try:
            if self._link.problem is not None:
                await self._look()
            return await self._link.run(script, keys, *arguments)
        except StoreGoneError:
            if self._monotonic() >= self._retry_at:
                self._retry_at = self._monotonic() + _RETRY_S
            raise

    async def _look(self) -> None:
        if self._monotonic() < self._retry_at:
            raise StoreGoneError
        await self._link.call(lambda client: client.ping(), probe=True)
        # The link's runs protect accounts of sessions; these stores notice losses by themselves.
        self._link.close_circuit({})

    async def aclose(self) -> None:
        """Close all connections."""
        await self._link.aclose()
