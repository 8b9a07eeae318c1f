"""Scripts for steps that must be atomic in Redis."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha1


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script, and its name in Redis."""

    text: str

    @property
    def sha(self) -> str:
        """SHA-1 of the text, Redis's name for the script."""
        return sha1(self.text.encode(), usedforsecurity=False).hexdigest()


REPLACE = Script("""
-- A session's next version, if it still is the one that was read.
-- KEYS: session, turns in flight. ARGV: version read, TTL in ms, losses folded in,
-- number of fields, fields and values, names of turns that are over.
if (redis.call('HGET', KEYS[1], 'v') or '') ~= ARGV[1] then return 0 end
local fields = tonumber(ARGV[4])
local values = {}
for i = 5, 4 + fields do values[#values + 1] = ARGV[i] end
redis.call('HSET', KEYS[1], unpack(values))
local folded = tonumber(ARGV[3])
if folded > 0 then
  if redis.call('HINCRBY', KEYS[1], 'l', -folded) <= 0 then redis.call('HDEL', KEYS[1], 'l') end
end
for i = 5 + fields, #ARGV do redis.call('HDEL', KEYS[2], ARGV[i]) end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('PEXPIRE', KEYS[2], ARGV[2])
return 1
""")

OPEN_TURN = Script("""
-- KEYS: session, turns in flight. ARGV: turn, its note, TTL in ms, notes at most, store key.
if redis.call('HLEN', KEYS[2]) >= tonumber(ARGV[4]) then
  redis.call('HINCRBY', KEYS[1], 'l', 1)
  redis.call('HSETNX', KEYS[1], 'k', ARGV[5])
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
else
  redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
end
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return 1
""")

LOSE = Script("""
-- KEYS: session, turns in flight. ARGV: losses, store key, TTL in ms, names of notes and notes.
redis.call('HINCRBY', KEYS[1], 'l', ARGV[1])
redis.call('HSETNX', KEYS[1], 'k', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
for i = 4, #ARGV, 2 do redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1]) end
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return 1
""")

STATE = Script("""
-- A sign of life, and the epoch. A new one begins where accounts may have been lost: a proxy was
-- killed, a server was restarted, or ARGV[4] says so.
-- KEYS: state. ARGV: proxy, ms until a silent proxy counts as killed, name for a new epoch,
-- whether to begin one, servers and their runs.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local lost = ARGV[4] == '1'
local all = redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  if string.sub(all[i], 1, 2) == 'b:' and now - tonumber(all[i + 1]) > tonumber(ARGV[2]) then
    redis.call('HDEL', KEYS[1], all[i])
    lost = true
  end
end
for i = 5, #ARGV, 2 do
  if redis.call('HGET', KEYS[1], 'r:' .. ARGV[i]) ~= ARGV[i + 1] then
    redis.call('HSET', KEYS[1], 'r:' .. ARGV[i], ARGV[i + 1])
    lost = true
  end
end
redis.call('HSET', KEYS[1], 'b:' .. ARGV[1], now)
local epoch = redis.call('HGET', KEYS[1], 'epoch')
if lost or not epoch then
  epoch = ARGV[3]
  redis.call('HSET', KEYS[1], 'epoch', epoch)
end
return epoch
""")
