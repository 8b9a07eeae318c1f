"""A directory of sessions by history, tenant and age. Entries are hints, perhaps outdated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ...model.session import Session
from ..summary import SessionOverview
from . import keys as names
from .fair_bound import FairBound
from .keys import Keys
from .link import RedisLink
from .sealing import Seal
from .stored import SessionCandidate, chain_of, longest_whole, opening_of, overview_of

_MAX_OPENINGS = 32
"""Sessions with one opening that are considered, latest first."""

_CHUNKS = (16, 512)
"""Numbers of history lengths per query: the longest lengths are the likeliest."""

_MAX_LISTED = 1000

_Pipeline = Any


class Directory:
    """Writes and follows the hints. Every method raises StoreGoneError if Redis is gone."""

    def __init__(
        self,
        link: RedisLink,
        keys: Keys,
        seal: Seal,
        *,
        ttl_s: float,
        max_sessions: int | None,
        clock: Callable[[], float],
    ) -> None:
        self._link = link
        self._keys = keys
        self._seal = seal
        self._ttl_s = ttl_s
        self._bound = (
            FairBound(
                link, keys.owners, most=max_sessions, ttl_s=ttl_s, delete=self._delete, clock=clock
            )
            if max_sessions is not None
            else None
        )

    async def enter(self, session: Session, chain: Sequence[int], now: float) -> None:
        """Make a session findable. If there are too many, the tenant with the most loses its least
        recently updated ones."""
        keys, ttl_ms = self._keys, round(self._ttl_s * 1000)
        digest = keys.digest(session.tenant, session.id)
        listed, owned = keys.tenant(session.tenant), keys.owned(session.tenant)
        opening = opening_of(session, chain)

        def commands(pipe: _Pipeline) -> None:
            pipe.zadd(keys.all, {digest: now})
            pipe.zremrangebyscore(keys.all, "-inf", now - self._ttl_s)
            pipe.zadd(listed, {session.id: now})
            pipe.zremrangebyscore(listed, "-inf", now - self._ttl_s)
            pipe.pexpire(listed, ttl_ms)
            if chain:
                whole = keys.whole(session.tenant, session.key, chain[-1])
                pipe.set(whole, session.id, px=ttl_ms)
            if opening is not None:
                entry = keys.opening(session.tenant, session.key, opening)
                pipe.zadd(entry, {session.id: now})
                pipe.zremrangebyrank(entry, 0, -_MAX_OPENINGS - 1)
                pipe.pexpire(entry, ttl_ms)
            if self._bound is not None:
                pipe.zadd(owned, {digest: now})
                pipe.pexpire(owned, ttl_ms)
                self._bound.counted(pipe, owned)

        *_, count = await self._link.together(commands)
        if self._bound is not None:
            await self._bound.keep(owned, count)

    async def remove(self, tenant: str, session_id: str) -> bool:
        """Delete a session; return True if it existed."""
        digest = self._keys.digest(tenant, session_id)
        entry, flight = self._keys.of_digest(digest)
        there, *_ = await self._link.together(
            lambda pipe: (
                pipe.delete(entry),
                pipe.delete(flight),
                pipe.zrem(self._keys.all, digest),
                pipe.zrem(self._keys.tenant(tenant), session_id),
                pipe.zrem(self._keys.owned(tenant), digest),
            )
        )
        return bool(there)

    def _delete(self, pipe: _Pipeline, digest: bytes) -> None:
        pipe.zrem(self._keys.all, digest)
        for entry in self._keys.of_digest(digest.decode()):
            pipe.delete(entry)

    async def candidates(
        self, tenant: str, key: str, chain: Sequence[int], shortest: int
    ) -> list[SessionCandidate]:
        """Return sessions from hints, down to the longest that ``chain`` wholly continues."""
        keys = self._keys
        found: dict[str, SessionCandidate] = {}
        opening = []
        if shortest <= len(chain):
            entry = keys.opening(tenant, key, chain[shortest - 1])
            opening = [entry]
        end = len(chain)
        for size in _lengths(end):
            values = chain[end - size : end]
            entries = [keys.whole(tenant, key, value) for value in values]

            def commands(
                pipe: _Pipeline, entries: list[str] = entries, opening: list[str] = opening
            ) -> None:
                for entry in opening:
                    pipe.zrevrange(entry, 0, _MAX_OPENINGS - 1)
                for entry in entries:
                    pipe.get(entry)

            answers = await self._link.together(commands)
            hinted = [name for answer in answers[: len(opening)] for name in answer]
            hinted += [name for name in answers[len(opening) :] if name]
            await self._look_up(tenant, (name.decode() for name in hinted), found)
            opening = []
            end -= size
            whole = longest_whole([*found.values()], chain)
            if whole is not None and len(whole.chain) > end:
                break
        return [*found.values()]

    async def _look_up(
        self, tenant: str, ids: Iterable[str], found: dict[str, SessionCandidate]
    ) -> None:
        """Add the histories of sessions."""
        asked = [name for name in dict.fromkeys(ids) if name not in found]
        entries = [self._keys.session(tenant, name) for name in asked]
        answers = await self._link.together(
            lambda pipe: [pipe.hmget(each, [names.CHAIN, names.UPDATED]) for each in entries],
            empty=not entries,
        )
        for name, (stored, updated) in zip(asked, answers, strict=True):
            found[name] = SessionCandidate(name, chain_of(stored), float(updated or 0))

    async def listed(self, tenant: str, now: float) -> tuple[SessionOverview, ...]:
        """Return the tenant's sessions, latest first."""
        entry, least = self._keys.tenant(tenant), now - self._ttl_s
        found = await self._link.call(
            lambda client: client.zrevrangebyscore(entry, "+inf", least, start=0, num=_MAX_LISTED)
        )
        entries = [self._keys.session(tenant, name.decode()) for name in found]
        lines = await self._link.together(
            lambda pipe: [pipe.hmget(each, [names.OVERVIEW, names.NAME]) for each in entries],
            empty=not entries,
        )
        seen = (overview_of(line, name, tenant, self._seal) for line, name in lines)
        return tuple(each for each in seen if each is not None)

    async def count(self, now: float) -> int:
        """Return the number of all tenants' sessions."""
        entry, least = self._keys.all, now - self._ttl_s
        return int(await self._link.call(lambda client: client.zcount(entry, least, "+inf")))


def _lengths(total: int) -> Iterable[int]:
    """Yield the number of lengths for each query, up to ``total`` in all."""
    few, many = _CHUNKS
    size = few
    while total > 0:
        yield min(size, total)
        total -= size
        size = many
