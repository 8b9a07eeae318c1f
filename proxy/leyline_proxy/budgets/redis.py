"""Usage in Redis, which several proxies share.

=====================  =====================================================================
``budget:{T}:W:B``     a tenant's usage in the window W that begins at B: a hash
``t`` ``n``            its fields: tokens and billionths of the currency that are used
``t12`` ``n12``        those that requests hold until the slot of that number
=====================  =====================================================================

T is a digest of the tenant's name. All entries of a tenant are in one slot of a cluster, so that a
script may use several. An entry goes an hour after its window, whatever the time is at Redis.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from ..model.budgets import Amount, Asked, Period, Reserved, Settlement, Usage
from ..sessions.redis.keys import Keys
from ..sessions.redis.link import RedisOptions, ScriptLink, StoreGoneError
from ..sessions.redis.scripts import Script
from .store import BudgetStoreGoneError

_SPARE_S = 3600.0

_USAGE = """
local function usage(key, slot, sweep)
  local sums, all = {t = 0, n = 0, th = 0, nh = 0}, redis.call('HGETALL', key)
  for i = 1, #all, 2 do
    local unit, lapses = string.sub(all[i], 1, 1), tonumber(string.sub(all[i], 2))
    if not lapses then
      sums[unit] = tonumber(all[i + 1])
    elseif lapses > slot then
      sums[unit .. 'h'] = sums[unit .. 'h'] + tonumber(all[i + 1])
    elseif sweep then
      redis.call('HDEL', key, all[i])
    end
  end
  return sums
end
local function told(found, sums)
  for _, name in ipairs({'t', 'n', 'th', 'nh'}) do
    found[#found + 1] = string.format('%.0f', sums[name])
  end
end
"""

RESERVE = Script(
    _USAGE
    + """
-- KEYS: a tenant's usage by window. ARGV: slot of now, slot in which the hold lapses, tokens,
-- billionths, 1 to force, then of each window: limits of both (empty for none), time to
-- keep it in milliseconds.
local slot, tokens, nanos = tonumber(ARGV[1]), tonumber(ARGV[3]), tonumber(ARGV[4])
local admitted, all = true, {}
for i, key in ipairs(KEYS) do
  local sums = usage(key, slot, true)
  all[i] = sums
  local most, worth = tonumber(ARGV[3 + 3 * i]), tonumber(ARGV[4 + 3 * i])
  if most and sums.t + sums.th + tokens > most then admitted = false end
  if worth and sums.n + sums.nh + nanos > worth then admitted = false end
end
admitted = admitted or ARGV[5] == '1'
local found = {admitted and '1' or '0'}
for i, key in ipairs(KEYS) do
  if admitted then
    redis.call('HINCRBY', key, 't' .. ARGV[2], ARGV[3])
    redis.call('HINCRBY', key, 'n' .. ARGV[2], ARGV[4])
    redis.call('PEXPIRE', key, ARGV[5 + 3 * i])
    all[i].th, all[i].nh = all[i].th + tokens, all[i].nh + nanos
  end
  told(found, all[i])
end
return found
"""
)

SETTLE = Script("""
-- KEYS: a tenant's usage by window. ARGV of each: slot of the hold (0 for none), tokens and
-- billionths held, as negative numbers, those used, milliseconds to keep it.
for i, key in ipairs(KEYS) do
  local at = 6 * (i - 1)
  for j, unit in ipairs({'t', 'n'}) do
    local field = unit .. ARGV[at + 1]
    if redis.call('HINCRBY', key, field, ARGV[at + 1 + j]) <= 0 then
      redis.call('HDEL', key, field)
    end
    redis.call('HINCRBY', key, unit, ARGV[at + 3 + j])
  end
  redis.call('PEXPIRE', key, ARGV[at + 6])
end
return 1
""")

READ = Script(
    _USAGE
    + """
-- KEYS: a tenant's usage by window. ARGV: slot of now.
local found = {}
for _, key in ipairs(KEYS) do told(found, usage(key, tonumber(ARGV[1]))) end
return found
"""
)


class RedisBudgetStore:
    """A :class:`~.store.BudgetStore` for several proxies."""

    name = "redis"

    def __init__(
        self,
        options: RedisOptions,
        prefix: str,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._link = ScriptLink(options, "budget_store", monotonic)
        self._keys = Keys(prefix)
        self._now = now

    async def reserve(self, asked: Asked) -> Reserved:
        limits: list[object] = []
        for limit, period in zip(asked.limits, asked.periods, strict=True):
            limits += (_or_none(limit.tokens), _or_none(limit.nanos), self._kept_ms(period))
        head = (asked.slot, asked.lapses, *asked.amount, int(asked.forced))
        answer = await self._run(RESERVE, asked.tenant, asked.periods, *head, *limits)
        return Reserved(int(answer[0]) == 1, _usages(answer[1:]))

    async def settle(self, tenant: str, settlements: Sequence[Settlement]) -> None:
        arguments: list[int] = []
        for each in settlements:
            arguments += (each.lapses, -each.held.tokens, -each.held.nanos)
            arguments += (*each.used, self._kept_ms(each.period))
        await self._run(SETTLE, tenant, [each.period for each in settlements], *arguments)

    async def usages(self, asked: Asked) -> tuple[Usage, ...]:
        return _usages(await self._run(READ, asked.tenant, asked.periods, asked.slot))

    async def aclose(self) -> None:
        """Close all connections."""
        await self._link.aclose()

    def _kept_ms(self, period: Period) -> int:
        """Return the time to keep an entry, in milliseconds."""
        return int(1000 * (max(0.0, period.ends - self._now()) + _SPARE_S))

    async def _run(
        self, script: Script, tenant: str, periods: Sequence[Period], *arguments: object
    ) -> Any:
        keys = [self._keys.budget(tenant, each.window, each.begins) for each in periods]
        try:
            return await self._link.run(script, keys, *arguments)
        except StoreGoneError as error:
            raise BudgetStoreGoneError from error


def _usages(answer: Sequence[Any]) -> tuple[Usage, ...]:
    numbers = [int(each) for each in answer]
    rows = [numbers[at : at + 4] for at in range(0, len(numbers), 4)]
    return tuple(Usage(Amount(*row[:2]), Amount(*row[2:])) for row in rows)


def _or_none(limit: int | None) -> object:
    return "" if limit is None else limit
