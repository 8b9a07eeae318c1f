"""The plan of one turn: ordered steps from the cache and the declared copies. Pure.

::

    prompt  0 ──── prefix ──── x ── gap ── d ═══ copy ═══ e ─── gap ─── n
                   Reuse         Prefill       Copy            Prefill
                                               source [a, b), δ = d − a

The last prompt token is always prefilled (its logits are needed), and so is every destination
below the attention sink.

A tree of larger pages holds whole pages only. Copies that follow one another are a run, and a run
is clipped to the whole pages that it covers; what is left of it is prefilled with its neighbours.
The source needs no such edges: rows are copied one by one, into the slot that position modulo page
asks for.

Where a model keeps state per sequence, runs end at anchors of their sources, and forwards start at
anchors alone; see :mod:`.anchors`. Rows that are cached after the last anchor need no copy::

    prompt  0 ── prefix ── anchor ── cached rows ── x ═══ copy ═══ e    no forward from the anchor
    prompt  0 ── prefix ── anchor ──── gap ──────── x ── literal ── d ═══ copy ═══ e
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm

from leyline_engine.admit.anchors import StateCopy, StateTerms, state_copies
from leyline_engine.contract import (
    MAX_EXTENTS,
    CopySegment,
    Directive,
    Extent,
    LineageRun,
    Mode,
    ReuseKind,
    joined,
)
from leyline_engine.records.lineage import first_spliced

PAGE_SIZES = frozenset({1, 16, 32, 64, 128})
"""Tokens per page for which splices are tested."""


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
    """Tokens in the tree. With state, the first copy may follow rows after the last anchor."""
    copies: tuple[CopySegment, ...]
    prefills: tuple[Prefill, ...]
    evicted: int = 0
    """Tokens of an edit's copies whose source slots, or state, are gone."""
    kinds: tuple[ReuseKind | None, ...] = ()
    """By source, what its copies are: None for an edit's; empty if all are."""
    states: tuple[StateCopy, ...] = ()
    """States that move with the copies, by destination: one at the end of each run, and those at
    anchors inside of a run, which spare later edits a forward."""

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

    @property
    def spliced_extents(self) -> tuple[Extent, ...]:
        """Half-open extents of the prompt that are copied for edits, merged where they meet; empty
        if there are more than :data:`~.contract.MAX_EXTENTS`."""
        extents = joined((copy.dest, copy.dest_end) for copy in self.edit_copies)
        return tuple(extents) if len(extents) <= MAX_EXTENTS else ()

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
    def stages(self) -> int:
        """Number of forwards that compute gaps before the request's own, if each takes one."""
        return sum(step.end < self.length for step in self.prefills)

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
    stage_cost: int = 0,
    kinds: Sequence[ReuseKind | None] = (),
    page: int = 1,
    joins: bool = False,
    state: StateTerms | None = None,
) -> Plan:
    """Lay copies and prefills over a prompt.

    Args:
        length: prompt tokens, at least 1.
        prefix: tokens found in the radix tree; below ``length``.
        copies: sorted by destination, non-overlapping.
        available: per source, the number of its leading tokens that are still cached.
        sink: destinations below this are prefilled.
        min_copy: shorter copies are prefilled with their neighbours, which costs no forward. With
            larger pages, this is on runs of copies.
        stage_cost: tokens whose prefill takes as long as one more forward. A gap in front of a run
            of copies needs a forward of its own, so a shorter run there is prefilled with both of
            its neighbours; one that follows the prefix needs none.
        kinds: see :attr:`Plan.kinds`.
        page: tokens per page of the tree; ``prefix`` is a multiple of it.
        joins: True if copies that follow one another count as one also with pages of one token.
        state: terms of the state that the model keeps per sequence; None if it keeps none.
    """
    kept, evicted = _usable(length, max(prefix, sink), copies, available, kinds)
    if state is not None:
        wanted = kept
        prefix, kept = _anchored(
            wanted, prefix, state, page=page, min_copy=min_copy, stage_cost=stage_cost
        )
        if not kept:
            evicted += sum(c.length for c in wanted if not kinds or kinds[c.source] is None)
        plan = _laid(length, prefix, kept, evicted, kinds)
        return replace(plan, states=state_copies(kept, state, page))
    runs = copy_runs(kept) if page > 1 or joins else [(copy,) for copy in kept]
    kept = [copy for run in runs for copy in _whole_pages(run, page, min_copy)]
    kept = _worth_a_stage(kept, prefix, stage_cost)
    return _laid(length, prefix, kept, evicted, kinds)


def _laid(
    length: int,
    prefix: int,
    kept: Sequence[CopySegment],
    evicted: int,
    kinds: Sequence[ReuseKind | None],
) -> Plan:
    """Return the plan that prefills between copies."""
    prefills: list[Prefill] = []
    cursor = prefix
    for copy in kept:
        if copy.dest > cursor:
            prefills.append(Prefill(cursor, copy.dest))
        cursor = copy.dest_end
    if cursor < length:
        prefills.append(Prefill(cursor, length))
    return Plan(length, prefix, tuple(kept), tuple(prefills), evicted, tuple(kinds))


def _usable(
    length: int,
    floor: int,
    copies: Sequence[CopySegment],
    available: Sequence[int],
    kinds: Sequence[ReuseKind | None],
) -> tuple[list[CopySegment], int]:
    """Return the parts of copies that can be made, and the tokens of edits that are evicted."""
    kept: list[CopySegment] = []
    evicted = 0
    for copy in copies:
        skip = max(0, floor - copy.dest)
        wanted = min(copy.length, length - 1 - copy.dest)
        usable = min(wanted, available[copy.source] - copy.start)
        if not kinds or kinds[copy.source] is None:
            evicted += max(0, wanted - max(skip, usable))
        if usable > skip:
            kept.append(
                CopySegment(copy.source, copy.start + skip, copy.start + usable, copy.dest + skip)
            )
    return kept, evicted


def copy_runs(copies: Sequence[CopySegment]) -> list[tuple[CopySegment, ...]]:
    """Return copies, sorted by destination, grouped where they follow one another without a gap."""
    runs: list[list[CopySegment]] = []
    for copy in copies:
        if runs and runs[-1][-1].dest_end == copy.dest:
            runs[-1].append(copy)
        else:
            runs.append([copy])
    return [tuple(run) for run in runs]


def page_floor(position: int, page: int) -> int:
    """Return the start of the page that has a position."""
    return position // page * page


def _whole_pages(run: Sequence[CopySegment], page: int, min_copy: int) -> tuple[CopySegment, ...]:
    """Return a run as far as it covers whole pages of the prompt; nothing if that is too short."""
    begin, end = -(-run[0].dest // page) * page, page_floor(run[-1].dest_end, page)
    if end - begin < max(min_copy, 1):
        return ()
    return tuple(
        CopySegment(c.source, c.start + first - c.dest, c.start + last - c.dest, first)
        for c in run
        for first, last in [(max(c.dest, begin), min(c.dest_end, end))]
        if first < last
    )


def _anchored(
    copies: Sequence[CopySegment],
    prefix: int,
    state: StateTerms,
    *,
    page: int,
    min_copy: int,
    stage_cost: int,
) -> tuple[int, list[CopySegment]]:
    """Return where the tree's part ends, and the copies that state can follow.

    A run that joins cached rows needs no forward from the last anchor. Any other begins where a
    forward leaves an anchor.
    """
    kept: list[CopySegment] = []
    cursor, step = prefix, lcm(state.grid, page)
    for whole in copy_runs(copies):
        run = state.ended(whole, page)
        if not run:
            continue
        begin, end = run[0].dest, run[-1].dest_end
        rows = page_floor(min(max(prefix, state.rows), end - max(state.window, 1)), page)
        joins = not kept and begin <= max(rows, prefix)
        if joins:
            begin, least = max(begin, rows), min_copy
        else:
            begin, least = cursor - (cursor - begin) // step * step, max(min_copy, stage_cost)
        if end - begin < max(least, 1):
            continue
        prefix = begin if joins else prefix
        kept += _after(run, begin)
        cursor = end
    return prefix, kept


def _after(run: Sequence[CopySegment], begin: int) -> Iterator[CopySegment]:
    """Yield the part of a run at or after a position of the prompt."""
    for copy in run:
        skip = max(0, begin - copy.dest)
        if skip < copy.length:
            yield CopySegment(copy.source, copy.start + skip, copy.end, copy.dest + skip)


def _worth_a_stage(
    copies: Sequence[CopySegment], prefix: int, stage_cost: int
) -> list[CopySegment]:
    """Return copies without runs that cost more than they save; see :func:`plan_turn`.

    Each decision stands for itself: a run with a gap in front of it costs one forward, whatever
    becomes of the runs before it.
    """
    return [
        copy
        for run in copy_runs(copies)
        if run[0].dest <= prefix or run[-1].dest_end - run[0].dest >= stage_cost
        for copy in run
    ]


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
