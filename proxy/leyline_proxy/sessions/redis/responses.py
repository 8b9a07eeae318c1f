"""Responses for ``previous_response_id`` in Redis. They are all text, so a key is required."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import zstandard

from ...model.stored_response import StoredResponse, decode, encode
from .fair_bound import FairBound
from .keys import Keys
from .link import RedisLink, StoreGoneError
from .sealing import Seal, owner_of

_LEVEL = 3
_MAX_UNPACKED = 1 << 30


class RedisResponseStore:
    """A :class:`~leyline_proxy.sessions.stored_responses.ResponseStore` for several proxies.

    Args:
        link: the session store's link; that store maintains it.
        seal: must hide what it closes.
        max_bytes: largest stored response in bytes; a longer one isn't kept.
        max_responses: with more, the tenant with the most loses its least recently used ones.

    Raises:
        ValueError: the seal has no key.
    """

    def __init__(
        self,
        link: RedisLink,
        *,
        ttl_s: float,
        seal: Seal,
        prefix: str = "leyline",
        max_bytes: int = 4 << 20,
        max_responses: int = 10_000,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if not seal.hides:
            raise ValueError("responses are text: they are stored in Redis with a key only")
        self._link = link
        self._ttl_s = ttl_s
        self._seal = seal
        self._keys = Keys(prefix)
        self._max_bytes = max_bytes
        self._max_responses = max_responses
        self._clock = clock
        self._bound = FairBound(
            link,
            self._keys.responses,
            most=max_responses,
            ttl_s=ttl_s,
            delete=lambda pipe, entry: pipe.delete(entry),
            clock=clock,
        )

    async def put(self, tenant: str, response_id: str, stored: StoredResponse) -> None:
        packed = zstandard.ZstdCompressor(level=_LEVEL).compress(encode(stored))
        data = self._seal.close(packed, _owner(tenant, response_id))
        if len(data) > self._max_bytes or not self._max_responses:
            await self.delete(tenant, response_id)
            return
        entry, ttl_ms = self._keys.response(tenant, response_id), round(self._ttl_s * 1000)
        with suppress(StoreGoneError):
            # First the name by which a quarantine finds it, then the text.
            await self._list(tenant, response_id, stored)
            *_, count = await self._link.together(
                lambda pipe: (pipe.set(entry, data, px=ttl_ms), *self._noted(pipe, tenant, entry))
            )
            await self._bound.keep(self._keys.responses_of(tenant), count)

    async def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        entry, ttl_ms = self._keys.response(tenant, response_id), round(self._ttl_s * 1000)
        try:
            data, *_ = await self._link.together(
                lambda pipe: (pipe.get(entry), pipe.pexpire(entry, ttl_ms))
            )
        except StoreGoneError:
            return None
        packed = self._seal.open(data or b"", _owner(tenant, response_id))
        if packed is None:
            return None
        stored = _unpacked(packed)
        listed = self._keys.responses_in(tenant, stored.session) if stored is not None else None
        with suppress(StoreGoneError):
            await self._link.together(
                lambda pipe: (
                    *self._noted(pipe, tenant, entry),
                    *(() if listed is None else (pipe.pexpire(listed, ttl_ms),)),
                )
            )
        return stored

    async def delete(self, tenant: str, response_id: str) -> bool:
        entry, listed = self._keys.response(tenant, response_id), self._keys.responses_of(tenant)
        try:
            there, _ = await self._link.together(
                lambda pipe: (pipe.delete(entry), pipe.zrem(listed, entry))
            )
        except StoreGoneError:
            return False
        return bool(there)

    async def count_in(self, tenant: str, session: str) -> int | None:
        listed = self._keys.responses_in(tenant, session)
        try:
            found = await self._link.call(lambda client: client.zrange(listed, 0, -1))
            held = [await self.get(tenant, each.decode()) for each in found]
        except StoreGoneError:
            return None
        return sum(each is not None for each in held)

    async def delete_from(self, tenant: str, session: str, turn: int) -> int:
        listed = self._keys.responses_in(tenant, session)
        try:
            found = await self._link.call(lambda client: client.zrangebyscore(listed, turn, "+inf"))
            deleted = [await self.delete(tenant, each.decode()) for each in found]
            await self._link.call(lambda client: client.zremrangebyscore(listed, turn, "+inf"))
        except StoreGoneError:
            return 0
        return sum(deleted)

    async def _list(self, tenant: str, response_id: str, stored: StoredResponse) -> None:
        """Note a response among those of its session."""
        listed = self._keys.responses_in(tenant, stored.session)
        await self._link.together(
            lambda pipe: (
                pipe.zadd(listed, {response_id: stored.turn}),
                pipe.zremrangebyrank(listed, 0, -1 - self._max_responses),
                pipe.pexpire(listed, round(self._ttl_s * 1000)),
            )
        )

    def _noted(self, pipe: Any, tenant: str, entry: str) -> tuple[object, ...]:
        now, listed = self._clock(), self._keys.responses_of(tenant)
        return (
            pipe.zadd(listed, {entry: now}),
            pipe.pexpire(listed, round(self._ttl_s * 1000)),
            *self._bound.counted(pipe, listed),
        )


def _unpacked(packed: bytes) -> StoredResponse | None:
    try:
        # The decompressor doesn't apply the bound to a frame that states its size.
        if zstandard.frame_content_size(packed) > _MAX_UNPACKED:
            return None
        return decode(zstandard.ZstdDecompressor().decompress(packed, _MAX_UNPACKED))
    except zstandard.ZstdError:
        return None


def _owner(tenant: str, response_id: str) -> bytes:
    # Differs from a session's owner, so that neither opens in the other's place.
    return b"response\0" + owner_of(tenant, response_id)
