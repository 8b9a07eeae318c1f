"""Names of an engine's pages in claims and events, after the source that first brought them.

Sources share their beginnings, and a page must count once. So the first source that brings a page
gives it its name, and the path of a later source goes through pages of the earlier. On a path, a
source's pages lie together, in order. A page is known by its first slot. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from .events import Run

Page = tuple[str, int]


class PageNames:
    """Names of pages, kept as long as somebody needs them.

    Args:
        page: tokens per page.
    """

    def __init__(self, page: int = 1) -> None:
        self._page = page
        self._names: dict[int, Page] = {}
        self._slots: dict[Page, int] = {}

    def __len__(self) -> int:
        return len(self._names)

    def name(self, source: str, slots: Sequence[int]) -> tuple[Run, ...]:
        """Return the runs of a whole path; pages without a name get one.

        Args:
            slots: of whole pages, from the root on, in key order.
        """
        firsts = slots[:: self._page]
        title = self._title(source, firsts)
        return tuple(_runs(self._named(title, place, slot) for place, slot in enumerate(firsts)))

    def _title(self, source: str, slots: Sequence[int]) -> str:
        """Return the source's name, altered if another session's or tenant's source has it here.

        No source's own name has a space in it.
        """
        places = [place for place, slot in enumerate(slots) if slot not in self._names]
        title, number = source, 1
        while any((title, place) in self._slots for place in places):
            number += 1
            title = f"{source} #{number}"
        return title

    def _named(self, source: str, place: int, slot: int) -> Page:
        known = self._names.get(slot)
        if known is None:
            known = (source, place)
            self._names[slot], self._slots[known] = known, slot
        return known

    def known(self, slots: Sequence[int]) -> tuple[Run, ...]:
        """Return the runs of those pages that have names.

        Args:
            slots: of whole pages.
        """
        pages = map(self._names.get, slots[:: self._page])
        return tuple(_runs(page for page in pages if page is not None))

    def forget(self, runs: Iterable[Run]) -> None:
        """Drop the names of pages that are gone or have no holder."""
        for run in runs:
            for place in range(run.start, run.end):
                slot = self._slots.pop((run.source, place), None)
                if slot is not None:
                    del self._names[slot]

    def clear(self) -> None:
        """Drop all names: nothing is cached any more."""
        self._names.clear()
        self._slots.clear()


def _runs(pages: Iterable[Page]) -> Iterator[Run]:
    current: Run | None = None
    for source, place in pages:
        if current is not None and (current.source, current.end) == (source, place):
            current = Run(source, current.start, place + 1)
            continue
        if current is not None:
            yield current
        current = Run(source, place, place + 1)
    if current is not None:
        yield current
