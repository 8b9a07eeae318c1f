"""Sorted runs of pages, as sets. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from .events import Run


def count(runs: Iterable[Run]) -> int:
    """Return the number of pages in disjoint runs."""
    return sum(run.pages for run in runs)


def pages_of(runs: Iterable[Run]) -> Iterator[tuple[str, int]]:
    """Yield (source, page), one by one."""
    for run in runs:
        for page in range(run.start, run.end):
            yield run.source, page


def runs_of(pages: Iterable[tuple[str, int]]) -> tuple[Run, ...]:
    """Return the fewest runs that hold these pages."""
    found: list[Run] = []
    for source, page in sorted(pages):
        if found and found[-1].source == source and found[-1].end == page:
            found[-1] = Run(source, found[-1].start, page + 1)
        else:
            found.append(Run(source, page, page + 1))
    return tuple(found)


def first_pages(runs: Sequence[Run], pages: int) -> tuple[Run, ...]:
    """Return the leading ``pages`` of runs."""
    taken: list[Run] = []
    for run in runs:
        if pages <= 0:
            break
        taken.append(Run(run.source, run.start, min(run.end, run.start + pages)))
        pages -= run.pages
    return tuple(taken)


def last_pages(runs: Sequence[Run], pages: int) -> tuple[Run, ...]:
    """Return the last ``pages`` of runs, in order."""
    taken: list[Run] = []
    for run in reversed(runs):
        if pages <= 0:
            break
        taken.append(Run(run.source, max(run.start, run.end - pages), run.end))
        pages -= run.pages
    return tuple(reversed(taken))


def joined(*parts: Iterable[Run]) -> tuple[Run, ...]:
    """Concatenate runs, and join those that touch."""
    found: list[Run] = []
    for run in (run for part in parts for run in part):
        if found and (found[-1].source, found[-1].end) == (run.source, run.start):
            found[-1] = Run(run.source, found[-1].start, run.end)
        else:
            found.append(run)
    return tuple(found)


def without(runs: Iterable[Run], gone: Sequence[Run]) -> tuple[Run, ...]:
    """Return runs without the pages of others."""
    left = list(runs)
    for hole in gone:
        left = [piece for run in left for piece in _cut(run, hole)]
    return tuple(left)


def _cut(run: Run, hole: Run) -> Iterator[Run]:
    if run.source != hole.source or hole.end <= run.start or run.end <= hole.start:
        yield run
        return
    if run.start < hole.start:
        yield Run(run.source, run.start, hole.start)
    if hole.end < run.end:
        yield Run(run.source, hole.end, run.end)
