"""What hard claims keep locked, kept so that admission reads it in microseconds. Pure.

Claims may lie over one another. A page is locked until the last of its holders lets go, and counts
once. Per source, the holders' edges cut what is locked into stretches; each has the latest deadline
of its holders.
"""

from __future__ import annotations

import heapq
import sys
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from .events import Run

ClaimKey = tuple[str, str]
"""(tenant, id)."""

FOREVER = sys.maxsize
"""Deadline of what no clock ends."""


@dataclass(slots=True)
class _Locked:
    """The locks over one source."""

    holds: dict[ClaimKey, tuple[tuple[Run, ...], int]] = field(default_factory=dict)
    """Runs and deadline, by holder."""
    starts: list[int] = field(default_factory=list)
    sums: list[int] = field(default_factory=lambda: [0])
    """Pages locked before the stretch of the same index."""
    untils: list[int] = field(default_factory=list)
    ends: list[tuple[int, ClaimKey]] = field(default_factory=list)
    """Where each holder's last run ends; sorted."""

    def rebuild(self) -> None:
        """Cut into stretches anew."""
        edges: list[tuple[int, int, int]] = []
        for number, (runs, deadline) in enumerate(self.holds.values()):
            for run in runs:
                edges.append((run.start, number, deadline))
                edges.append((run.end, number, -1))
        edges.sort()
        self.starts, self.untils, self.sums = [], [], [0]
        # Latest deadline first; who has ended is dropped when it comes up.
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
        self.ends = sorted((runs[-1].end, key) for key, (runs, _) in self.holds.items())

    def before(self, end: int) -> int:
        """Pages locked before page ``end``."""
        index = bisect_left(self.starts, end)
        if index == 0:
            return 0
        length = self.sums[index] - self.sums[index - 1]
        return self.sums[index - 1] + min(length, end - self.starts[index - 1])

    def untils_before(self, end: int) -> dict[int, int]:
        """Pages locked before ``end``, by when they come free."""
        found: dict[int, int] = {}
        for index in range(bisect_left(self.starts, end)):
            length = self.sums[index + 1] - self.sums[index]
            pages = min(length, end - self.starts[index])
            found[self.untils[index]] = found.get(self.untils[index], 0) + pages
        return found

    def covered(self, end: int) -> Sequence[ClaimKey]:
        """Holders that lock nothing at or behind ``end``."""
        count = bisect_right(self.ends, end, key=lambda entry: entry[0])
        return [key for _, key in self.ends[:count]]


class Protection:
    """Locked pages of all sources."""

    def __init__(self) -> None:
        self._sources: dict[str, _Locked] = {}
        self._source_of: dict[ClaimKey, str] = {}
        self._ids: dict[str, dict[str, None]] = {}
        self._pages_by_until: dict[int, int] = {}
        self._untils: list[int] = []
        self._freed: list[int] | None = None
        self.pages = 0
        """Locked for any claim, each counted once."""

    def hold(self, key: ClaimKey, runs: tuple[Run, ...], deadline_ms: int | None) -> None:
        """A claim locks these runs of one source, sorted and not empty; once until it lets go."""
        source = runs[0].source
        self._source_of[key] = source
        self._ids.setdefault(key[0], {})[key[1]] = None
        locked = self._sources.setdefault(source, _Locked())
        locked.holds[key] = (runs, FOREVER if deadline_ms is None else deadline_ms)
        self._rebuild(locked)

    def let_go(self, key: ClaimKey) -> None:
        """A claim locks nothing any more."""
        source = self._source_of.pop(key)
        ids = self._ids[key[0]]
        del ids[key[1]]
        if not ids:
            del self._ids[key[0]]
        locked = self._sources[source]
        del locked.holds[key]
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

    def before(self, source: str, end: int) -> int:
        """Pages of a source locked before page ``end``."""
        locked = self._sources.get(source)
        return locked.before(end) if locked else 0

    def blocking(self, source: str, end: int) -> tuple[ClaimKey, ...]:
        """Claims that lock anything but the first ``end`` pages of a source."""
        # Copying all and taking out a few is faster than asking each.
        keys = self._source_of.copy()
        for key in self._covered(source, end):
            del keys[key]
        return tuple(keys)

    def blocking_of(self, tenant: str, source: str, end: int) -> tuple[str, ...]:
        """The ids of one tenant among them."""
        ids = self._ids.get(tenant, {}).copy()
        for owner, name in self._covered(source, end):
            if owner == tenant:
                del ids[name]
        return tuple(ids)

    def _covered(self, source: str, end: int) -> Sequence[ClaimKey]:
        locked = self._sources.get(source)
        return locked.covered(end) if locked and end else ()

    def free_at(self, pages: int, source: str, end: int) -> int | None:
        """When deadlines alone will have freed so many pages beyond the first of a source.

        Args:
            pages: at least 1.
            source, end: what comes free before page ``end`` of this source doesn't count.

        Returns:
            A deadline in ms; None if it needs a release.
        """
        if self._freed is None:
            self._freed = list(accumulate(self._pages_by_until[until] for until in self._untils))
        freed = self._freed
        locked = self._sources.get(source)
        own = sorted(locked.untils_before(end).items()) if locked and end else []
        own_untils = [until for until, _ in own]
        own_freed = [0, *accumulate(pages for _, pages in own)]

        def beyond(index: int) -> int:
            return freed[index] - own_freed[bisect_right(own_untils, self._untils[index])]

        first = bisect_left(range(len(freed)), pages, key=beyond)
        if first == len(freed) or self._untils[first] == FOREVER:
            return None
        return self._untils[first]
