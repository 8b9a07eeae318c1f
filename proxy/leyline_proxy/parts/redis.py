"""Entries in Redis, which several proxies share.

=====================  =====================================================================
``parts:{T}:S:p``      a session's texts: a hash from name to entry; ``m`` its marks
``parts:{T}:old:p``    a tenant's texts by the time of their writing
``parts:{T}:size:p``   their sizes; the empty name has the sum
=====================  =====================================================================

T and S are keyed hashes of tenant and session. All entries of a tenant are in one slot of a
cluster, so that a script may use several.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TypeVar

from ..sessions.redis.link import RedisLink, RedisOptions, StoreGoneError, StoreRefusedError
from ..sessions.redis.scripts import Script
from .limits import FLOOR_S
from .names import MARK, TEXT, Shelf, kind_of, millis_of
from .space import PartUsage, SpaceError

T = TypeVar("T")

_RETRY_S = 1.0
"""Pause between two tries while Redis can't be reached."""

_AT_ONCE = 500
"""Entries that one call of a script removes."""

_TAG = 32

WRITE = Script("""
-- KEYS: entries, by age, sizes. ARGV: TTL of entries in ms, of a tenant's lists, session, then
-- name, time and entry of each.
for i = 4, #ARGV, 3 do
  local name, member, size = ARGV[i], ARGV[3] .. ARGV[i], #ARGV[i + 2]
  redis.call('HSET', KEYS[1], name, ARGV[i + 2])
  redis.call('ZADD', KEYS[2], ARGV[i + 1], member)
  local known = tonumber(redis.call('HGET', KEYS[3], member) or '0')
  redis.call('HSET', KEYS[3], member, size)
  redis.call('HINCRBY', KEYS[3], '', size - known)
end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
redis.call('PEXPIRE', KEYS[2], ARGV[2])
redis.call('PEXPIRE', KEYS[3], ARGV[2])
return 1
""")

REMOVE = Script("""
-- KEYS: entries, by age, sizes. ARGV: session, names.
for i = 2, #ARGV do
  local member = ARGV[1] .. ARGV[i]
  redis.call('HDEL', KEYS[1], ARGV[i])
  redis.call('ZREM', KEYS[2], member)
  local size = redis.call('HGET', KEYS[3], member)
  if size then
    redis.call('HDEL', KEYS[3], member)
    redis.call('HINCRBY', KEYS[3], '', -size)
  end
end
return 1
""")

READ = Script("""
-- The beginnings of entries. KEYS: entries. ARGV: bytes of each, names.
local found = {}
for i = 2, #ARGV do
  local entry = redis.call('HGET', KEYS[1], ARGV[i])
  found[#found + 1] = entry and string.sub(entry, 1, tonumber(ARGV[1])) or false
end
return found
""")

OLDEST = Script("""
-- The oldest entries that have to go, and the bytes that stay. KEYS: by age, sizes.
-- ARGV: bytes that may stay, time before which all go, number of entries at most.
local left = tonumber(redis.call('HGET', KEYS[2], '') or '0')
local answer = {left}
local oldest = redis.call('ZRANGE', KEYS[1], 0, tonumber(ARGV[3]) - 1, 'WITHSCORES')
for i = 1, #oldest, 2 do
  if tonumber(oldest[i + 1]) >= tonumber(ARGV[2]) and left <= tonumber(ARGV[1]) then break end
  left = left - tonumber(redis.call('HGET', KEYS[2], oldest[i]) or '0')
  answer[#answer + 1] = oldest[i]
end
answer[1] = left
return answer
""")


class RedisSpace:
    """A :class:`~.space.Space` in Redis."""

    name = "redis"

    def __init__(self, options: RedisOptions, prefix: str) -> None:
        self._link = RedisLink(options, "recall_store")
        self._prefix = f"{prefix}:parts"
        self._retry_at = 0.0
        self._refused = False

    @property
    def problem(self) -> str | None:
        refused = "Redis refused a command" if self._refused else None
        return self._link.problem or refused

    @property
    def usage(self) -> PartUsage:
        return PartUsage()

    async def check(self) -> None:
        try:
            await self._link.call(lambda client: client.ping(), probe=True)
        except StoreGoneError:
            self._retry_at = time.monotonic() + _RETRY_S
            return
        # The link's runs protect accounts of sessions; these entries need no such care.
        self._link.close_circuit({})

    async def names(self, shelf: Shelf) -> Sequence[str]:
        # Texts first: a forget whose mark isn't seen has removed nothing before.
        keys = [self._keys(shelf, kind)[0] for kind in (TEXT, MARK)]
        found = await self._ask(
            lambda: self._link.together(lambda pipe: [pipe.hkeys(key) for key in keys])
        )
        return [name.decode() for names in found for name in names]

    async def read(
        self, shelf: Shelf, names: Collection[str], most: int | None = None
    ) -> Mapping[str, bytes]:
        found: dict[str, bytes] = {}
        for kind, own in _by_kind(names).items():
            key, bound = self._keys(shelf, kind)[0], -1 if most is None else most
            entries = await self._ask(lambda: self._link.run(READ, [key], bound, *own))  # noqa: B023
            found |= {
                name: entry for name, entry in zip(own, entries, strict=True) if entry is not None
            }
        return found

    async def write(self, shelf: Shelf, entries: Mapping[str, bytes], ttl_s: float) -> None:
        for kind, names in _by_kind(entries).items():
            values = [value for name in names for value in (name, millis_of(name), entries[name])]
            lists_ms = round((ttl_s + FLOOR_S) * 1000)
            arguments = (round(ttl_s * 1000), lists_ms, shelf[1], *values)
            keys = self._keys(shelf, kind)
            await self._ask(lambda: self._link.run(WRITE, keys, *arguments))  # noqa: B023

    async def remove(self, shelf: Shelf, names: Collection[str]) -> None:
        for kind, own in _by_kind(names).items():
            keys = self._keys(shelf, kind)
            await self._ask(lambda: self._link.run(REMOVE, keys, shelf[1], *own))  # noqa: B023

    async def trim(self, tenant: str, kind: str, *, most: int, before: int) -> int:
        keys = self._keys((tenant, ""), kind)[1:]
        while True:
            left, *members = await self._ask(
                lambda: self._link.run(OLDEST, keys, most, before, _AT_ONCE)
            )
            by_session: dict[str, list[str]] = {}
            for member in map(bytes.decode, members):
                by_session.setdefault(member[:_TAG], []).append(member[_TAG:])
            for session, names in by_session.items():
                await self.remove((tenant, session), names)
            if len(members) < _AT_ONCE:
                return int(left)

    async def count(self, tenant: str, since: int) -> int:
        key = self._keys((tenant, ""), TEXT)[1]
        return int(
            await self._ask(
                lambda: self._link.call(lambda client: client.zcount(key, since, "+inf"))
            )
        )

    async def tidy(self, before: Mapping[str, int]) -> None:
        """Do nothing: Redis drops what has expired."""

    async def aclose(self) -> None:
        await self._link.aclose()

    def _keys(self, shelf: Shelf, kind: str) -> list[str]:
        base = f"{self._prefix}:{{{shelf[0]}}}"
        return [f"{base}:{shelf[1]}:{kind}", f"{base}:old:{kind}", f"{base}:size:{kind}"]

    async def _ask(self, work: Callable[[], Awaitable[T]]) -> T:
        if self._link.problem is not None and time.monotonic() >= self._retry_at:
            await self.check()
        try:
            answer = await work()
        except StoreRefusedError:
            self._refused = True
            raise SpaceError("Redis refused a command") from None
        except StoreGoneError:
            if time.monotonic() >= self._retry_at:
                self._retry_at = time.monotonic() + _RETRY_S
            raise SpaceError(self._link.problem or "Redis is out of reach") from None
        self._refused = False
        return answer


def _by_kind(names: Collection[str]) -> Mapping[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(kind_of(name), []).append(name)
    return found
