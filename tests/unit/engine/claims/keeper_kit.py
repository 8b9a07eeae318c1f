"""A keeper over a naive cache."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import count, takewhile
from typing import Any

from leyline_engine.claims.feasibility import Arithmetic
from leyline_engine.claims.keeper import ClaimKeeper
from leyline_engine.claims.limits import Limits
from leyline_engine.claims.place import ClaimPlace
from leyline_engine.claims.protection import ClaimKey
from leyline_engine.contract import (
    Claim,
    ClaimKind,
    ClaimReply,
    ClaimStatus,
    LineageRun,
    Predicate,
    SubmitClaim,
)
from leyline_engine.records.sources import SourceRegistry, SourceTurn

Prefix = tuple[int, ...]
POOL = 100
ALL = Limits(share=1.0, engine_share=1.0)


class NaiveShelf:
    """A page of slots for each cached prefix of whole pages; pages are used again."""

    def __init__(self, page: int = 1) -> None:
        self.page = page
        self.cached: dict[Prefix, int] = {}
        self.locks: dict[ClaimKey, Prefix] = {}
        self.ranks: dict[ClaimKey, tuple[Prefix, int]] = {}
        self.empty = list(range(POOL // page))

    def fill(self, keys: Sequence[int]) -> None:
        """Cache a sequence."""
        for prefix in self._prefixes(keys):
            if prefix not in self.cached:
                self.cached[prefix] = self.empty.pop(0)

    def _prefixes(self, keys: Sequence[int]) -> list[Prefix]:
        ends = range(self.page, len(keys) + 1, self.page)
        return [tuple(keys[:end]) for end in ends]

    def _path(self, keys: array[int]) -> Prefix:
        found = takewhile(self.cached.__contains__, self._prefixes(keys))
        return max(found, key=len, default=())

    def slots(self, place: ClaimPlace) -> Sequence[int]:
        """Slots of the cached part of a path."""
        return self.cached_slots(place.keys)

    def cached_slots(self, keys: array[int]) -> Sequence[int]:
        """Slots of the cached prefix."""
        return self.slots_of(self._prefixes(self._path(keys)))

    def slots_of(self, prefixes: Iterable[Prefix]) -> list[int]:
        """Slots of the last page of each."""
        firsts = (self.cached[prefix] * self.page for prefix in prefixes)
        return [first + offset for first in firsts for offset in range(self.page)]

    def lock(self, claim: ClaimKey, place: ClaimPlace, length: int) -> None:
        """All of it must be there."""
        keys = place.keys[:length]
        assert claim not in self.locks and self._path(keys) == tuple(keys)
        self.locks[claim] = tuple(keys)

    def unlock(self, claim: ClaimKey) -> None:
        """Also of claims that hold none."""
        self.locks.pop(claim, None)

    def rank(self, claim: ClaimKey, place: ClaimPlace, length: int, priority: int) -> None:
        """Rank the part of the path that the tree holds."""
        assert claim not in self.ranks
        self.ranks[claim] = (self._path(place.keys[:length]), priority)

    def unrank(self, claim: ClaimKey) -> None:
        """Also of claims that hold none."""
        self.ranks.pop(claim, None)

    def free(self) -> int:
        """The number of slots without an owner."""
        return len(self.empty) * self.page

    def locked(self) -> set[Prefix]:
        """Prefixes that claims lock."""
        return {prefix for path in self.locks.values() for prefix in self._prefixes(path)}

    def rank_of(self, prefix: Prefix) -> int:
        """Its highest priority."""
        found = (p for path, p in self.ranks.values() if path[: len(prefix)] == prefix)
        return max(found, default=0)

    def drop(self, prefixes: Sequence[Prefix]) -> None:
        """These are gone."""
        for prefix in prefixes:
            self.empty.append(self.cached.pop(prefix))

    def evict(self, amount: int) -> list[ClaimKey]:
        """Pages at the ends of paths, the lowest rank first; the claims that lost any."""
        hit: dict[ClaimKey, None] = {}
        for _ in range(amount):
            leaves = [
                prefix
                for prefix in self.cached.keys() - self.locked()
                if not any(p[: -self.page] == prefix for p in self.cached)
            ]
            if not leaves:
                break
            gone = min(leaves, key=lambda leaf: (self.rank_of(leaf), leaf))
            hit |= dict.fromkeys(
                k for k, (path, _) in self.ranks.items() if path[: len(gone)] == gone
            )
            self.drop([gone])
        return list(hit)


class Desk:
    """A keeper, its shelf and its turns."""

    def __init__(self, page: int = 1, **limits: Any) -> None:
        self.shelf = NaiveShelf(page)
        self.registry = SourceRegistry()
        limit = Limits(**limits) if limits else ALL
        arithmetic = Arithmetic(page, strict=False)
        self.keeper = ClaimKeeper(self.registry, self.shelf, POOL, arithmetic, limits=limit)
        self._names = count(1)

    def turn(
        self,
        tokens: Sequence[int],
        *,
        session: str = "s",
        tenant: str = "t",
        cut: int | None = None,
    ) -> SourceTurn:
        """Retain a turn; all but its last token has KV. From ``cut`` on it is spliced."""
        name = f"t{next(self._names)}"
        lineage = () if cut is None else (LineageRun(cut, f"of {name}"),)
        turn = SourceTurn(name, array("q", [*tokens, 77]), "", lineage, tenant, session)
        self.registry.retain((tenant, session), turn)
        self.shelf.fill(turn.keys()[:-1])
        return turn

    def claim(self, source: str, end: int, start: int = 0, **terms: Any) -> ClaimReply:
        """Claim tokens of a turn, hard unless terms say otherwise."""
        share = terms.pop("share", 1.0)
        given = {"id": "c", "tenant": "t", "session": "s", "kind": ClaimKind.HARD} | terms
        claim = Claim(predicate=Predicate(source, start, end, share), **given)
        return self.keeper.carry_out(SubmitClaim(claim))

    def status(self, name: str = "c", tenant: str = "t") -> ClaimStatus:
        """The status of a claim."""
        return self.keeper.book.status(tenant, name)

    def evict(self, amount: int) -> None:
        """Evict, and notify the keeper."""
        self.keeper.gave_way(self.shelf.evict(amount), "r")
