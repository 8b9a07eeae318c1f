"""A trial of the session store in Redis, below a prefix of its own."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from secrets import token_hex
from typing import Any, TypeVar

from redis.exceptions import RedisClusterException, RedisError, ResponseError

from ..model.session import Session
from ..sessions.redis import RedisLink, RedisOptions, RedisSessionStore, Seal
from ..sessions.redis.keys import Keys
from ..sessions.redis.scripts import LOSE

T = TypeVar("T")

_TTL_S = 10.0
_TENANT, _KEY, _TURN = "doctor", "", "t"
_OUT, _KEPT = "pushed-out", "kept"
_HISTORY = (1,)


class _OpenLink(RedisLink):
    """A link that raises the server's own errors, which the store doesn't catch."""

    async def call(self, command: Callable[[Any], Awaitable[T]], *, probe: bool = False) -> T:
        return await command(self._client)

    def close_circuit(self, runs: Mapping[str, str]) -> None:
        self.problem = None


async def try_store(options: RedisOptions, prefix: str) -> ResponseError | None:
    """Write, find and delete sessions as a proxy does; return the server's refusal, if any.

    Nothing remains, unless Redis goes away meanwhile.

    Raises:
        RedisError, RedisClusterException, OSError: Redis doesn't answer.
    """
    link, keys = _OpenLink(options), Keys(f"{prefix}:doctor:{token_hex(8)}")
    try:
        # First, so that a user who may not delete leaves nothing.
        await _delete(link, keys)
        try:
            await _write_and_find(link, keys)
        finally:
            with suppress(RedisError, RedisClusterException, OSError):
                await _delete(link, keys)
    except ResponseError as refusal:
        return refusal
    finally:
        await link.aclose()
    return None


async def _write_and_find(link: RedisLink, keys: Keys) -> None:
    store = RedisSessionStore(link, ttl_s=_TTL_S, seal=Seal(), prefix=keys.prefix, max_sessions=1)
    await store.connect()
    for name in (_OUT, _KEPT):
        session = Session(name, _TENANT, _KEY, (), (), 1, time.time())
        await store.open_turn(_TENANT, name, _TURN)
        await store.update(_TENANT, name, lambda _, new=session: new, _HISTORY, ends=_TURN)  # type: ignore[misc]
    found = await store.matches(_TENANT, _KEY, _HISTORY, 1)
    if [match.session for match in found] != [_KEPT] or await store.count() != 1:
        raise ResponseError("other sessions were found than were written")
    await store.sessions(_TENANT)
    # Commands for rare cases: many alike conversations, a script new to the server, and responses
    # that a quarantine deletes.
    opening, entries = keys.opening(_TENANT, _KEY, _HISTORY[0]), _entries(keys, _KEPT)
    await link.call(lambda client: client.zremrangebyrank(opening, 0, -1))
    await link.call(lambda client: client.eval(LOSE.text, 2, *entries, 1, _KEY, 1000))
    await link.call(lambda client: client.zrangebyscore(opening, 0, 1))
    await store.close_turn(_TENANT, _KEPT, _TURN)
    await store.delete(_TENANT, _KEPT)


async def _delete(link: RedisLink, keys: Keys) -> None:
    gone = [keys.all, keys.state, keys.owners, keys.tenant(_TENANT), keys.owned(_TENANT)]
    gone += [keys.whole(_TENANT, _KEY, _HISTORY[-1]), *_entries(keys, _OUT), *_entries(keys, _KEPT)]
    await link.together(lambda pipe: [pipe.delete(entry) for entry in gone])


def _entries(keys: Keys, session: str) -> tuple[str, str]:
    return keys.of_digest(keys.digest(_TENANT, session))
