"""Anchors: the positions at which state that a model keeps per sequence is still cached.

Rows are kept per token, and any run of them can be copied. The last rows of a sliding window, a
recurrent state and the inputs of a convolution belong to a place in a sequence: fresh tokens can
only start where an engine still holds them. Pure; an engine reports the positions.

::

    source   0 ─────── s  cut  a ══════════════ b ── c     b: the last anchor in front of c
    prompt   0 ─ rows ─ s ══════ copy ══════ e ─ fresh     state at e: the source's at b
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from leyline_engine.contract import CopySegment


@dataclass(frozen=True, slots=True)
class Anchors:
    """Positions of one sequence in front of which all of its state is cached; 0 always is one."""

    spans: tuple[tuple[int, int], ...] = ()
    """First and last position of each unbroken group, both included, ascending and disjoint."""

    @classmethod
    def at(cls, positions: Iterable[int]) -> Anchors:
        """Return anchors at single positions."""
        return cls(tuple((position, position) for position in sorted(set(positions))))

    @classmethod
    def everywhere(cls, length: int) -> Anchors:
        """Return the anchors of a model that keeps nothing but rows."""
        return cls(((0, length),))

    def last(self, position: int, *, phase: int = 0, step: int = 1) -> int:
        """Return the last anchor at or in front of a position; 0 if there is no other.

        Args:
            phase: with ``step``, accepts only anchors ``a`` with ``a ≡ phase (mod step)``.
        """
        upto = bisect_right(self.spans, position, key=lambda span: span[0])
        for first, end in reversed(self.spans[:upto]):
            best = min(end, position)
            best -= (best - phase) % step
            if best >= first:
                return best
        return 0

    def within(self, start: int, end: int, *, phase: int = 0, step: int = 1) -> Iterator[int]:
        """Yield the last anchor of each group after ``start``, up to ``end``; see :meth:`last`."""
        for first, last in self.spans:
            best = min(last, end)
            best -= (best - phase) % step
            if max(first, start + 1) <= best:
                yield best

    def common(self, others: Anchors) -> Anchors:
        """Return the positions that are anchors of both."""
        spans = [
            (max(a, c), min(b, d))
            for a, b in self.spans
            for c, d in others.spans
            if max(a, c) <= min(b, d)
        ]
        return Anchors(tuple(sorted(spans)))


@dataclass(frozen=True, slots=True)
class StateTerms:
    """The terms on which a prompt's state can be continued; None stands for a model without any."""

    sources: tuple[Anchors, ...]
    """Anchors of each source."""
    rows: int = 0
    """Leading tokens of the prompt whose rows are cached, at an anchor or not."""
    window: int = 0
    """Rows in front of a position that layers with a sliding window read there."""
    grid: int = 1
    """A forward leaves an anchor at a multiple of so many tokens from where it started."""

    def ended(self, run: tuple[CopySegment, ...], page: int) -> tuple[CopySegment, ...]:
        """Return the part of a run that ends at the last anchor; nothing if there is none.

        A copy that is shorter than the window leaves some of it to the copy in front of it, whose
        end must be an anchor then, too.
        """
        copies = list(run)
        while copies:
            copy = copies.pop()
            end = self.sources[copy.source].last(
                copy.end, phase=(copy.start - copy.dest) % page, step=page
            )
            if end <= copy.start:
                continue
            last = CopySegment(copy.source, copy.start, end, copy.dest)
            if self._reads_on(copies, self.window - last.length):
                return (*copies, last)
        return ()

    def _reads_on(self, copies: list[CopySegment], rows: int) -> bool:
        """Return True if the last ``rows`` of copies are cached in layers with a window."""
        for copy in reversed(copies):
            if rows <= 0:
                return True
            if self.sources[copy.source].last(copy.end) != copy.end:
                return False
            rows -= copy.length
        return True


@dataclass(frozen=True, slots=True)
class StateCopy:
    """The state in front of a source's position becomes that in front of the prompt's ``dest``."""

    source: int
    position: int
    dest: int


def state_copies(
    copies: Iterable[CopySegment], terms: StateTerms, page: int
) -> tuple[StateCopy, ...]:
    """Return the states that move with copies, which are sorted by destination, to pages' edges."""
    found: list[StateCopy] = []
    for copy in copies:
        shift = copy.dest - copy.start
        anchors = terms.sources[copy.source]
        moved = anchors.within(copy.start, copy.end, phase=-shift % page, step=page)
        found += [StateCopy(copy.source, at, at + shift) for at in moved]
    return tuple(found)
