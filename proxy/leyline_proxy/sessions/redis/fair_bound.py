"""One bound for the entries of all tenants: the tenant with the most loses its oldest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .link import RedisLink


class FairBound:
    """Bounds the number of all tenants' entries; no tenant evicts another's.

    Each tenant has a sorted set that lists its entries by the time of their last use. Every method
    raises StoreGoneError if Redis is gone.

    Args:
        everyone: name of the sorted set of those lists, by their numbers of entries.
        most: upper bound of all tenants' entries together.
        ttl_s: seconds after which an entry expires by itself.
        delete: queues the commands that delete a listed entry.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        link: RedisLink,
        everyone: str,
        *,
        most: int,
        ttl_s: float,
        delete: Callable[[Any, bytes], object],
        clock: Callable[[], float],
    ) -> None:
        self._link = link
        self._everyone = everyone
        self._most = most
        self._ttl_s = ttl_s
        self._delete = delete
        self._clock = clock

    def counted(self, pipe: Any, listed: str) -> tuple[object, ...]:
        """Queue the commands that drop expired entries from a tenant's list, and count the rest."""
        gone = self._clock() - self._ttl_s
        return pipe.zremrangebyscore(listed, "-inf", gone), pipe.zcard(listed)

    async def keep(self, listed: str, count: int) -> None:
        """Note a tenant's number of entries, and delete entries if there are too many."""
        _, held = await self._link.together(
            lambda pipe: (
                pipe.zadd(self._everyone, {listed: count}),
                pipe.zrange(self._everyone, 0, -1, withscores=True),
            )
        )
        counts = {name: int(number) for name, number in held}
        while counts and (over := sum(counts.values()) - self._most) > 0:
            *_, next_most, most = [0, *sorted(counts.values())]
            who = next(name for name, number in counts.items() if number == most)
            left = await self._relieve(who, target=max(next_most, most - over), most=most)
            counts[who] = left
            if not left:
                del counts[who]

    async def _relieve(self, listed: str, *, target: int, most: int) -> int:
        """Delete a tenant's oldest entries; return the number left.

        Args:
            target: entries that may stay; one less than ``most`` at most.
            most: presumed number of entries. Entries that expired meanwhile count as deleted.
        """
        *_, there = await self._link.together(lambda pipe: self.counted(pipe, listed))
        surplus = min(there, most) - min(target, most - 1)
        left = there - (await self._pop(listed, surplus) if surplus > 0 else 0)
        await self._link.together(
            lambda pipe: [
                pipe.zadd(self._everyone, {listed: left})
                if left
                else pipe.zrem(self._everyone, listed)
            ]
        )
        return int(left)

    async def _pop(self, listed: str, count: int) -> int:
        """Remove a tenant's oldest entries; return the number removed."""
        popped = await self._link.call(lambda client: client.zpopmin(listed, count))
        await self._link.together(
            lambda pipe: [self._delete(pipe, entry) for entry, _ in popped], empty=not popped
        )
        return len(popped)
