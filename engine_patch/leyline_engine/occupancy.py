"""A KV pool's slots by owner: claimed, cached exact or spliced, in flight, or free. Pure.

Each slot counts once, so that the owners sum to the capacity::

    capacity = free + claimed + exact + spliced + in flight
                      └──── in the radix tree ───┘
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from leyline_engine.claims.events import Run
from leyline_engine.records.ledger import SpanLedger
from leyline_engine.records.sources import SourceRegistry


@dataclass(frozen=True, slots=True)
class Cached:
    """Tokens in a radix tree, or a part of them.

    Attributes:
        exact: tokens under plain keys: KV that depends on the tokens before it and on nothing else.
        spliced: tokens after the first spliced position of their path.
    """

    exact: int = 0
    spliced: int = 0

    @property
    def total(self) -> int:
        return self.exact + self.spliced


@dataclass(frozen=True, slots=True)
class PoolLevels:
    """Slots of a pool by owner, in tokens.

    Attributes:
        cached: all tokens of the tree.
        claimed: tokens among them that live claims hold.
        peak: the most slots that weren't free at one time.
        states: slots of recurrent states that aren't free.
        free_states: those that are.
    """

    capacity: int
    free: int
    cached: Cached
    claimed: Cached
    peak: int
    states: int = 0
    free_states: int = 0

    def by_owner(self) -> dict[str, int]:
        """Return slots by the names of :data:`~leyline_engine.contract.metrics.POOL_OWNERS`."""
        return {
            "exact": self.cached.exact - self.claimed.exact,
            "spliced": self.cached.spliced - self.claimed.spliced,
            "claimed": self.claimed.total,
            "in_flight": self.capacity - self.free - self.cached.total,
            "free": self.free,
        }


@dataclass(frozen=True, slots=True)
class RegistryLevels:
    """Sizes of an engine's records of turns."""

    turns: int = 0
    tokens: int = 0
    spans: int = 0
    lineages: int = 0

    @classmethod
    def of(cls, registry: SourceRegistry, ledger: SpanLedger) -> RegistryLevels:
        """Return the sizes as they are now."""
        return cls(
            registry.count(), registry.token_count, ledger.span_count(), ledger.lineage_count()
        )


def held_by_claims(holds: Iterable[tuple[int, Iterable[Run]]], page: int = 1) -> Cached:
    """Return the tokens that claims hold together; pages that several hold count once.

    Args:
        holds: by claim, the position from which on its path is spliced, and its runs of pages. A
            page's number is its place on the path.
        page: tokens per page.
    """
    exact: dict[str, list[tuple[int, int]]] = {}
    spliced: dict[str, list[tuple[int, int]]] = {}
    for first, runs in holds:
        for run in runs:
            start, end = run.start * page, run.end * page
            if start < first:
                exact.setdefault(run.source, []).append((start, min(end, first)))
            if end > first:
                spliced.setdefault(run.source, []).append((max(start, first), end))
    return Cached(sum(map(_union, exact.values())), sum(map(_union, spliced.values())))


def _union(spans: list[tuple[int, int]]) -> int:
    """Return the length of the union of (start, end)."""
    found = reached = 0
    for start, end in sorted(spans):
        if end > reached:
            found += end - max(start, reached)
            reached = end
    return found
