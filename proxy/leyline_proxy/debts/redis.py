"""Debts in Redis, which proxies take over from one another.

====================  ======================================================================
``{debts}:live``      carriers by the time until which each counts as alive, in ms
``{debts}:of:C``      the debts of the carrier C: a hash from a digest of the debt's key
====================  ======================================================================

All entries are in one slot of a cluster, so that a script may move debts. Times are Redis's own.
Entries name tenants, sessions and engines, as lists of sessions do; they hold no text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from secrets import token_hex
from typing import Any

import msgspec

from ..sessions.redis.keys import Keys
from ..sessions.redis.link import RedisOptions, ScriptLink, StoreGoneError
from ..sessions.redis.scripts import Script
from .book import Debt, DebtKey, DebtStoreGoneError, Inherited

LEASE_S = 10.0
"""A carrier without a sign of life for so long has gone."""

_KEPT_MS = 30 * 86_400_000
"""Time that debts stay while no proxy runs, in milliseconds."""
_HEIRS_MOST = 64
"""Carriers that one look takes over."""

_NOW = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""

_ALIVE = (
    _NOW
    + """
-- KEYS[1]: carriers, KEYS[2]: this one's debts. ARGV: carrier, its lease in ms, ms to keep all.
local known = redis.call('ZSCORE', KEYS[1], ARGV[1]) and 1 or 0
redis.call('ZADD', KEYS[1], now + tonumber(ARGV[2]), ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
"""
)

WRITE = Script(
    _ALIVE
    + """
-- ARGV then: number of debts, their digests and values, digests of paid ones.
local last = 4 + 2 * tonumber(ARGV[4])
for i = 5, last, 2 do redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1]) end
for i = last + 1, #ARGV do redis.call('HDEL', KEYS[2], ARGV[i]) end
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return known
"""
)

BEAT = Script(
    _ALIVE
    + """
-- ARGV then: carriers at most, 1 for all of this carrier's debts.
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return {
  known,
  redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now - 1, 'LIMIT', 0, ARGV[4]),
  ARGV[5] == '1' and redis.call('HVALS', KEYS[2]) or {},
}
"""
)

TAKE = Script(
    _NOW
    + """
-- KEYS: carriers, debts of one that has gone, debts of the heir. ARGV: the one that has gone, ms to
-- keep the debts.
local until_ms = redis.call('ZSCORE', KEYS[1], ARGV[1])
if not until_ms or tonumber(until_ms) >= now then return {} end
local all, values = redis.call('HGETALL', KEYS[2]), {}
for i = 1, #all, 2 do
  redis.call('HSET', KEYS[3], all[i], all[i + 1])
  values[#values + 1] = all[i + 1]
end
redis.call('PEXPIRE', KEYS[3], ARGV[2])
redis.call('DEL', KEYS[2])
redis.call('ZREM', KEYS[1], ARGV[1])
return values
"""
)

LEAVE = Script("""
-- KEYS: carriers, this one's debts. ARGV: carrier.
if redis.call('EXISTS', KEYS[2]) == 1 then redis.call('ZADD', KEYS[1], 0, ARGV[1])
else redis.call('ZREM', KEYS[1], ARGV[1]) end
return 1
""")

_DEBT = msgspec.msgpack.Decoder(Debt)


class RedisDebtStore:
    """A :class:`~.store.DebtStore` for several proxies.

    Args:
        lease_s: a carrier without a sign of life for so long has gone.
    """

    name = "redis"

    def __init__(
        self,
        options: RedisOptions,
        prefix: str,
        *,
        lease_s: float = LEASE_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = ScriptLink(options, "debt_store", monotonic)
        self._keys = Keys(prefix)
        self._lease_ms = round(lease_s * 1000)
        self._carrier = token_hex(8)

    async def write(self, debts: Sequence[Debt], paid: Sequence[DebtKey]) -> bool:
        arguments: list[object] = [len(debts)]
        for each in debts:
            arguments += (self._keys.debt(*each.key), msgspec.msgpack.encode(each))
        arguments += [self._keys.debt(*key) for key in paid]
        return bool(await self._alive(WRITE, *arguments))

    async def inherit(self, *, whole: bool = False) -> Inherited:
        known, gone, own = await self._alive(BEAT, _HEIRS_MOST, int(whole))
        values: list[bytes] = list(own)
        for carrier in gone:
            values += await self._take(carrier.decode())
        return Inherited(tuple(debt for each in values if (debt := _read(each))), bool(known))

    async def aclose(self) -> None:
        with suppress(DebtStoreGoneError):
            await self._run(LEAVE, self._own_keys(), self._carrier)
        await self._link.aclose()

    def _own_keys(self) -> list[str]:
        return [self._keys.carriers, self._keys.debts_of(self._carrier)]

    async def _alive(self, script: Script, *arguments: object) -> Any:
        head = (self._carrier, self._lease_ms, _KEPT_MS)
        return await self._run(script, self._own_keys(), *head, *arguments)

    async def _take(self, carrier: str) -> list[bytes]:
        carriers, own = self._own_keys()
        keys = [carriers, self._keys.debts_of(carrier), own]
        found: list[bytes] = await self._run(TAKE, keys, carrier, _KEPT_MS)
        return found

    async def _run(self, script: Script, keys: Sequence[str], *arguments: object) -> Any:
        try:
            return await self._link.run(script, keys, *arguments)
        except StoreGoneError as error:
            raise DebtStoreGoneError from error


def _read(value: bytes) -> Debt | None:
    """Return a debt; None for one that another version wrote in another way."""
    try:
        return _DEBT.decode(value)
    except msgspec.MsgspecError:
        return None
