"""Pages locked by hard claims, stored so that admission reads them in microseconds. Pure.

Claims may overlap. A page is locked until the last of its holders lets go, and counts once. Per
source, the holders' edges cut the locked pages into stretches; each has the latest deadline of its
holders.

The pages that a claim locks may be named after several sources: pages that sessions share have the
name of the first source. A claim then locks the front of one source and continues in another. A
request that matches its last page has matched all of it.
"""

from __future__ import annotations

import heapq
import sys
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from .events import Run

ClaimKey = tuple[str, str]
"""(tenant, id)."""

FOREVER = sys.maxsize
"""Deadline of locks that no clock ends."""


@dataclass(slots=True)
class _Locked:
    """The locks over one source."""

    holds: dict[ClaimKey, tuple[tuple[Run, ...], int]] = field(default_factory=dict)
    """Runs and deadline, by holder."""
    last: dict[ClaimKey, int] = field(default_factory=dict)
    """End page of each claim whose last page is of this source."""
    starts: list[int] = field(default_factory=list)
    sums: list[int] = field(default_factory=lambda: [0])
    """Pages locked before the stretch of the same index."""
    untils: list[int] = field(default_factory=list)
    ends: list[tuple[int, ClaimKey]] = field(default_factory=list)
    """:attr:`last`, sorted."""

    def rebuild(self) -> None:
        """Cut the locked pages into stretches again."""
        edges: list[tuple[int, int, int]] = []
        for number, (runs, deadline) in enumerate(self.holds.values()):
            for run in runs:
                edges.append((run.start, number, deadline))
                edges.append((run.end, number, -1))
        edges.sort()
        self.starts, self.untils, self.sums = [], [], [0]
        # Latest deadline first; ended holders are dropped when they come up.
        open_now: list[tuple[int, int]] = []
        running: set[int] = set()
        for index, (at, number, deadline) in enumerate(edges):
            if deadline < 0:
                running.discard(number)
            else:
                running.add(number)
                heapq.heappush(open_now, (-deadline, number))
            behind = edges[index + 1][0] if index + 1 < len(edges) else at
            while open_now and open_now[0][1] not in running:
                heapq.heappop(open_now)
            if behind > at and open_now:
                self.starts.append(at)
                self.untils.append(-open_now[0][0])
                self.sums.append(self.sums[-1] + behind - at)
        self.ends = sorted((end, key) for key, end in self.last.items())

    def before(self, end: int) -> int:
        """Return the number of pages locked before page ``end``."""
        index = bisect_left(self.starts, end)
        if index == 0:
            return 0
        length = self.sums[index] - self.sums[index - 1]
        return self.sums[index - 1] + min(length, end - self.starts[index - 1])

    def add_untils(self, run: Run, found: dict[int, int]) -> None:
        """Add the run's locked pages to ``found``, by the time at which they come free."""
        for index in range(bisect_left(self.starts, run.end)):
            begin, length = self.starts[index], self.sums[index + 1] - self.sums[index]
            pages = min(begin + length, run.end) - max(begin, run.start)
            if pages > 0:
                found[self.untils[index]] = found.get(self.untils[index], 0) + pages

    def covered(self, end: int) -> Sequence[ClaimKey]:
        """Return the claims whose last page is of this source and before ``end``."""
        count = bisect_right(self.ends, end, key=lambda entry: entry[0])
        return [key for _, key in self.ends[:count]]


class Protection:
    """Locked pages of all sources."""

    def __init__(self) -> None:
        self._sources: dict[str, _Locked] = {}
        self._sources_of: dict[ClaimKey, tuple[str, ...]] = {}
        self._ids: dict[str, dict[str, None]] = {}
        self._pages_by_until: dict[int, int] = {}
        self._untils: list[int] = []
        self._freed: list[int] | None = None
        self.pages = 0
        """Number of pages locked for any claim, each counted once."""

    def hold(self, key: ClaimKey, runs: tuple[Run, ...], deadline_ms: int | None) -> None:
        """Lock these runs for a claim, not empty and in order; once until it lets go."""
        by_source: dict[str, tuple[Run, ...]] = {}
        for run in runs:
            by_source[run.source] = (*by_source.get(run.source, ()), run)
        self._sources_of[key] = tuple(by_source)
        self._ids.setdefault(key[0], {})[key[1]] = None
        for source, own in by_source.items():
            locked = self._sources.setdefault(source, _Locked())
            locked.holds[key] = (own, FOREVER if deadline_ms is None else deadline_ms)
            if source == runs[-1].source:
                locked.last[key] = runs[-1].end
            self._rebuild(locked)

    def let_go(self, key: ClaimKey) -> None:
        """Drop all locks of a claim."""
        ids = self._ids[key[0]]
        del ids[key[1]]
        if not ids:
            del self._ids[key[0]]
        for source in self._sources_of.pop(key):
            locked = self._sources[source]
            del locked.holds[key]
            locked.last.pop(key, None)
            self._rebuild(locked)
            if not locked.holds:
                del self._sources[source]

    def _rebuild(self, locked: _Locked) -> None:
        self._account(locked, -1)
        locked.rebuild()
        self._account(locked, 1)
        self._freed = None

    def _account(self, locked: _Locked, sign: int) -> None:
        for until, before, after in zip(locked.untils, locked.sums, locked.sums[1:], strict=False):
            pages = sign * (after - before)
            self.pages += pages
            if until not in self._pages_by_until:
                insort(self._untils, until)
                self._pages_by_until[until] = 0
            self._pages_by_until[until] += pages
            if not self._pages_by_until[until]:
                del self._pages_by_until[until]
                del self._untils[bisect_left(self._untils, until)]

    def count(self, runs: Sequence[Run]) -> int:
        """Return the number of locked pages in these runs."""
        found = 0
        for run in runs:
            if locked := self._sources.get(run.source):
                found += locked.before(run.end) - locked.before(run.start)
        return found

    def blocking(self, matched: Sequence[Run]) -> tuple[ClaimKey, ...]:
        """Return the claims that lock any page that a request doesn't match.

        Args:
            matched: leading pages of its prompt, in order.
        """
        # Copying all and removing a few is faster than testing each.
        keys = self._sources_of.copy()
        for key in self._covered(matched):
            del keys[key]
        return tuple(keys)

    def blocking_of(self, tenant: str, matched: Sequence[Run]) -> tuple[str, ...]:
        """Return the ids of those that are one tenant's."""
        ids = self._ids.get(tenant, {}).copy()
        for owner, name in self._covered(matched):
            if owner == tenant:
                del ids[name]
        return tuple(ids)

    def _covered(self, matched: Sequence[Run]) -> Iterator[ClaimKey]:
        for run in matched:
            if locked := self._sources.get(run.source):
                yield from locked.covered(run.end)

    def free_at(self, pages: int, matched: Sequence[Run]) -> int | None:
        """Return the time at which deadlines alone will have freed that many pages.

        Args:
            pages: at least 1.
            matched: pages that don't count when they come free.

        Returns:
            A deadline in ms; None if it needs a release.
        """
        if self._freed is None:
            self._freed = list(accumulate(self._pages_by_until[until] for until in self._untils))
        freed = self._freed
        own: dict[int, int] = {}
        for run in matched:
            if locked := self._sources.get(run.source):
                locked.add_untils(run, own)
        own_untils = sorted(own)
        own_freed = [0, *accumulate(own[until] for until in own_untils)]

        def beyond(index: int) -> int:
            return freed[index] - own_freed[bisect_right(own_untils, self._untils[index])]

        first = bisect_left(range(len(freed)), pages, key=beyond)
        if first == len(freed) or self._untils[first] == FOREVER:
            return None
        return self._untils[first]
