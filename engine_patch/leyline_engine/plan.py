"""The plan of one turn: ordered steps from the cache and the declared copies. Pure.

::

    prompt  0 ──── prefix ──── x ── gap ── d ═══ copy ═══ e ─── gap ─── n
                   Reuse         Prefill       Copy            Prefill
                                               source [a, b), δ = d − a

The last prompt token is always prefilled (its logits are needed), and so is every destination
below the attention sink.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leyline_engine.contract import (
    CopySegment,
    Directive,
    Extent,
    LineageRun,
    Mode,
    ReuseKind,
    joined,
)
from leyline_engine.lineage import first_spliced


@dataclass(frozen=True, slots=True)
class Prefill:
    """Compute prompt positions ``[start, end)``."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Ordered steps after a cached prefix; copies and prefills tile ``[prefix, length)``."""

    length: int
    prefix: int
    copies: tuple[CopySegment, ...]
    prefills: tuple[Prefill, ...]
    evicted: int = 0
    """Tokens of an edit's copies whose source slots are gone."""
    kinds: tuple[ReuseKind | None, ...] = ()
    """By source, what its copies are: None for an edit's; empty if all are."""

    @property
    def copied(self) -> int:
        """Number of tokens that are copied, for edits and for reuse."""
        return sum(copy.length for copy in self.copies)

    @property
    def spliced(self) -> int:
        """Number of tokens that are copied for edits."""
        return sum(copy.length for copy in self.edit_copies)

    @property
    def reused(self) -> int:
        """Number of tokens that are copied for reuse."""
        return self.copied - self.spliced

    @property
    def edit_copies(self) -> tuple[CopySegment, ...]:
        """Copies that are made for edits."""
        if not self.kinds:
            return self.copies
        return tuple(copy for copy in self.copies if self.kinds[copy.source] is None)

    def reused_of(self, kind: ReuseKind) -> int:
        """Return the number of tokens that are copied for reuse of a kind."""
        if not self.kinds:
            return 0
        return sum(copy.length for copy in self.copies if self.kinds[copy.source] is kind)

    @property
    def reused_extents(self) -> tuple[Extent, ...]:
        """Half-open extents of the prompt that are copied for reuse, merged where they meet."""
        if not self.kinds:
            return ()
        reused = (copy for copy in self.copies if self.kinds[copy.source] is not None)
        return tuple(joined((copy.dest, copy.dest_end) for copy in reused))

    @property
    def prefilled(self) -> int:
        return sum(step.end - step.start for step in self.prefills)


def plan_turn(
    length: int,
    prefix: int,
    copies: Sequence[CopySegment],
    available: Sequence[int],
    *,
    sink: int,
    min_copy: int = 1,
    kinds: Sequence[ReuseKind | None] = (),
) -> Plan:
    """Lay copies and prefills over a prompt.

    Args:
        length: prompt tokens, at least 1.
        prefix: tokens found in the radix tree; below ``length``.
        copies: sorted by destination, non-overlapping.
        available: per source, the number of its leading tokens that are still cached.
        sink: destinations below this are prefilled.
        min_copy: shorter copies are prefilled with their neighbours, which costs no forward.
        kinds: see :attr:`Plan.kinds`.
    """
    kept: list[CopySegment] = []
    evicted = 0
    floor = max(prefix, sink)
    for copy in copies:
        skip = max(0, floor - copy.dest)
        wanted = min(copy.length, length - 1 - copy.dest)
        usable = min(wanted, available[copy.source] - copy.start)
        if not kinds or kinds[copy.source] is None:
            evicted += max(0, wanted - max(skip, usable))
        if usable - skip >= min_copy:
            kept.append(
                CopySegment(copy.source, copy.start + skip, copy.start + usable, copy.dest + skip)
            )
    prefills: list[Prefill] = []
    cursor = prefix
    for copy in kept:
        if copy.dest > cursor:
            prefills.append(Prefill(cursor, copy.dest))
        cursor = copy.dest_end
    if cursor < length:
        prefills.append(Prefill(cursor, length))
    return Plan(length, prefix, tuple(kept), tuple(prefills), evicted, tuple(kinds))


def forget_limit(
    directives: Sequence[Directive], source: int, runs: Sequence[LineageRun], length: int
) -> int:
    """Return the number of a source's tokens that can't have read any span that is forgotten.

    Positions before a forgotten span never read it, unless an earlier splice moved KV that
    did; so the exact prefix of the source bounds the answer too.

    Args:
        directives: all directives of the turn.
        source: index of the source in question.
        runs: its lineage map.
        length: its tokens.

    Returns:
        A length; the whole source if nothing is forgotten.
    """
    starts = [d.start for d in directives if d.mode is Mode.FORGET and d.source == source]
    return min(*starts, first_spliced(runs, length)) if starts else length


def clip_copies(copies: Sequence[CopySegment], limits: Sequence[int]) -> tuple[CopySegment, ...]:
    """Return the part of each copy that is below its source's limit."""
    clipped = (CopySegment(c.source, c.start, min(c.end, limits[c.source]), c.dest) for c in copies)
    return tuple(copy for copy in clipped if copy.length > 0)
