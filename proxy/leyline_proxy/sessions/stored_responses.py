"""Where responses are kept for ``previous_response_id``."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ..responses.stored import StoredResponse, decode, encode


class ResponseStore(Protocol):
    """Responses by tenant and id. No method ever crosses from one tenant to another.

    None of them raises: a store that can't be reached keeps nothing and knows nothing.
    """

    async def put(self, tenant: str, response_id: str, stored: StoredResponse) -> None:
        """Keep a response, in place of one of the same id."""
        ...

    async def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """A response, or None when it never was, has expired or was deleted."""
        ...

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Remove a response; whether there was one."""
        ...


@dataclass(frozen=True, slots=True)
class _Entry:
    raw: bytes
    touched: float


class MemoryResponseStore:
    """A :class:`ResponseStore` for one process: bounded in number, bytes and age, least recently
    used out first. What is read counts as used, so a conversation that goes on stays whole."""

    def __init__(
        self,
        *,
        max_responses: int,
        max_bytes: int,
        ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._bytes = 0
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()

    async def put(self, tenant: str, response_id: str, stored: StoredResponse) -> None:
        self._expire()
        self._remove((tenant, response_id))
        raw = encode(stored)
        if len(raw) > self._max_bytes:
            # It would push out all others and not fit even then.
            return
        self._entries[tenant, response_id] = _Entry(raw, self._clock())
        self._bytes += len(raw)
        while len(self._entries) > self._max_responses or self._bytes > self._max_bytes:
            self._remove(next(iter(self._entries)))

    async def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        self._expire()
        entry = self._entries.pop((tenant, response_id), None)
        if entry is None:
            return None
        self._entries[tenant, response_id] = _Entry(entry.raw, self._clock())
        return decode(entry.raw)

    async def delete(self, tenant: str, response_id: str) -> bool:
        self._expire()
        return self._remove((tenant, response_id))

    def _expire(self) -> None:
        horizon = self._clock() - self._ttl_s
        # In order of the last use, so the oldest are in front.
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            if entry.touched >= horizon:
                return
            self._remove(key)

    def _remove(self, key: tuple[str, str]) -> bool:
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        self._bytes -= len(entry.raw)
        return True
