"""The execution of a plan in SGLang's pool: copies at once, gaps between them by stage rows.

::

    prompt  0 ── cached ── x ── gap ── d ══ copy ══ e ── gap ── f ══ copy ══ g ─── tail ─── n
    step                    stage row    splice      stage row     splice        the request itself

A copy needs nothing computed before it but its place in the tree, and the tree holds whole prefixes
only; so each gap is computed first, by a row of its own that is prefilled and nothing else. With
larger pages, the tree holds whole pages only: rows and copies end at their edges. Rows of several
requests share a forward. A gap is in the tree once its forward is launched, as SGLang's chunks are:
whatever reads its rows is queued after it. So the next step shares the next forward. All of it is
under the turn's lineage: until the request itself runs, no other request can match the copies.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.mem_cache.base_prefix_cache import MatchResult, TreeLock
from sglang.srt.mem_cache.common import checkpoint_kv_cache

from leyline_engine.admit.anchors import StateTerms
from leyline_engine.admit.edits import ResolvedEdit
from leyline_engine.admit.plan import (
    Plan,
    clip_copies,
    copy_runs,
    plan_turn,
)
from leyline_engine.admit.rules import CheckedRequest, Rules, extend_lineage
from leyline_engine.contract import ATTENTION_SINK, CopySegment, TokenCounts
from leyline_engine.records.ledger import Carried
from leyline_engine.records.lineage import runs_before
from leyline_engine.records.sources import SourceTurn
from leyline_engine.rows.copies import turnable_copies
from leyline_engine.rows.pool import SplicePool
from leyline_engine.sglang.publishing import Publisher
from leyline_engine.sglang.radix import LeylineRadixCache
from leyline_engine.sglang.sequence_state import StateSlots
from leyline_engine.sglang.stage_row import StageRow
from leyline_engine.sglang.turn import Phase, Source, Staging, Turn

MAX_RESTARTS = 3
"""Number of times a splice gives way to memory pressure before its request is simply prefilled."""

Admit = Callable[[Any], AddReqResult]
"""SGLang's own admission of one request."""


class NoRoomError(Exception):
    """The copies don't fit beside their locked sources."""


class OtherRankError(RuntimeError):
    """A splice that succeeded here is given up, because another rank could not do it."""


def planner(cache: LeylineRadixCache, *, min_copy: int, stage_cost: int) -> Callable[..., Plan]:
    """Return :func:`.plan_turn` for a tree's pages and a server's costs."""

    def lay(*args: Any, **options: Any) -> Plan:
        return plan_turn(
            *args,
            min_copy=min_copy,
            stage_cost=stage_cost,
            page=cache.page_size,
            # The slot before a cut was found by a token that is gone.
            joins=bool(cache.tree_keys.lookahead),
            **options,
        )

    return lay


class Splicer:
    """Moves turns from NEW to READY. One per scheduler; no clock, no chance.

    Args:
        cache: the tree.
        pool: copies and rotates rows.
        rules: decisions over the registry and the ledger.
        publisher: notes what copies have read, and what they publish, before they can be matched.
        lay: lays copies and prefills over a prompt; see :func:`planner`.
        agree: returns True if all tensor-parallel ranks succeeded; takes this rank's success.
        copied: called with the bytes of KV that a splice copied.
    """

    def __init__(
        self,
        cache: LeylineRadixCache,
        pool: SplicePool,
        rules: Rules,
        publisher: Publisher,
        *,
        lay: Callable[..., Plan],
        agree: Callable[[bool], bool],
        copied: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._cache = cache
        self._pool = pool
        self._rules = rules
        self._lay = lay
        self._publisher = publisher
        self._agree = agree
        self._copied = copied
        self._ahead = cache.tree_keys.lookahead

    def begin(
        self, turn: Turn, checked: CheckedRequest, match: MatchResult, room: Callable[[], int]
    ) -> None:
        """Plan a turn's edit and take its locks.

        Args:
            turn: a new turn whose edit was resolved; its lineage is that of its cached prefix.
            checked: the turn's request.
            match: its cached prefix.
            room: tokens that admission has left, given what is locked.

        Raises:
            NoRoomError: nothing is held.
        """
        edit = checked.edit
        assert edit is not None  # noqa: S101 - the caller's contract
        prompt = checked.prompt
        staging = Staging([], self._cache.lock(match.last_device_node), match.device_prefix_len)
        try:
            available, nodes = [], []
            for source in edit.sources:
                found = self._cache.find(source.keys(), turn.space_of(source))
                slots = self._cache.path_device_indices(found.last_device_node)
                lock = self._cache.lock(found.last_device_node)
                staging.sources.append(Source(slots, lock))
                available.append(self._cache.readable(slots))
                nodes.append(found.last_device_node)
            cacheable = self._cacheable(edit, available, len(prompt))
            slots = [source.slots for source in staging.sources]
            copies = turnable_copies(self._pool, cacheable, slots)
            plan = self._lay(
                len(prompt),
                staging.cursor,
                copies,
                available,
                sink=max(edit.payload.sink, ATTENTION_SINK),
                kinds=edit.kinds,
                state=self._terms(turn, prompt, nodes, staging.cursor),
            )
            gone = _edited(cacheable, edit) - _edited(copies, edit)
            plan = replace(plan, evicted=plan.evicted + gone)
            if plan.copies and self._cache.in_pages(plan.copied + plan.prefilled) > room():
                raise NoRoomError
            if plan.copies:
                # The map may be of more than the device has; copies are made in place of that.
                turn.lineage = runs_before(turn.lineage, plan.copies[0].dest)
            if plan.prefix > staging.cursor:
                lock = self._cache.lock_rows(turn.keys(prompt), turn.space, plan.prefix)
                self._hold(staging, lock, plan.prefix)
            turn.carried = self._carried(turn, checked, plan, staging.cursor)
        except BaseException:
            _let_go(self._cache, staging)
            raise
        turn.plan = plan
        turn.lineage = extend_lineage(turn.lineage, turn.carried)
        turn.staging = staging
        turn.move(Phase.STAGING)
        self._publisher.enter(turn)

    def _terms(
        self, turn: Turn, prompt: array[int], nodes: Sequence[Any], prefix: int
    ) -> StateTerms | None:
        """Return the terms of state per sequence; None if the model keeps none.

        Args:
            nodes: the node at which each source's last anchor is.
            prefix: the prompt's last anchor.
        """
        state = self._cache.state
        if state is None:
            return None
        rows = self._cache.rows_cached(turn.keys(prompt), turn.space, len(prompt) - 1)
        anchors = tuple(map(state.anchors, nodes))
        return StateTerms(anchors, max(prefix, rows), state.window)

    def _cacheable(
        self, edit: ResolvedEdit, available: Sequence[int], length: int
    ) -> tuple[CopySegment, ...]:
        """Return copies of what the tree may ever have had: the last page of a source is partial,
        and nothing was evicted of it. Nor do they reach further than a prompt is looked up."""
        within = self._cache.tree_keys.slots_within
        ends = [within(len(source.tokens) - 1) for source in edit.sources]
        copies = clip_copies(edit.copies, [max(pair) for pair in zip(ends, available, strict=True)])
        reach = length - 1 - self._ahead
        ends = [min(copy.end, copy.start + reach - copy.dest) for copy in copies]
        cut = (
            CopySegment(copy.source, copy.start, end, copy.dest)
            for copy, end in zip(copies, ends, strict=True)
        )
        return tuple(copy for copy in cut if copy.length > 0)

    def _carried(
        self, turn: Turn, checked: CheckedRequest, plan: Plan, cursor: int
    ) -> Carried | None:
        """Name the lineage of a turn's copies: one of its own if KV of the same name waits to be
        removed. The tree would take that KV for the copies, and it would be found again."""
        carried = self._rules.carry(checked, turn.lineage, plan)
        if carried is None:
            return None
        lineage = extend_lineage(turn.lineage, carried)
        prompt = turn.req.origin_input_ids
        if not self._cache.is_condemned(turn.keys_under(lineage, prompt)):
            return carried
        return self._rules.carry_alone(checked, turn.lineage, plan, turn.message_id, cursor)

    def advance(self, turn: Turn, admit: Admit, room: Callable[[], int]) -> AddReqResult | None:
        """Copy the next segments that can be copied, and send off the next gap.

        Returns:
            None if the turn is ready; otherwise admission's result for the row that computes the
            next gap, ``CONTINUE`` while one is being computed, or ``NO_TOKEN`` while the room that
            the next copy needs is promised to others.

        Raises:
            NoRoomError: no slots for a copy.
        """
        staging, plan = turn.staging, turn.plan
        assert staging is not None and plan is not None  # noqa: S101 - phase STAGING
        if staging.row is not None:
            self._take_over(staging.row)
            if not staging.row.complete:
                return AddReqResult.CONTINUE
            staging.row = None
        if turn.restarts > MAX_RESTARTS:
            raise NoRoomError
        for run in copy_runs(plan.copies):
            end = run[-1].dest_end
            if end <= staging.cursor:
                continue
            if run[0].dest > staging.cursor:
                return self._send_row(turn, run[0].dest, admit)
            if end - staging.cursor > room():
                return AddReqResult.NO_TOKEN
            self._copy(turn, run, staging)
        return None

    def _copy(self, turn: Turn, run: Sequence[CopySegment], staging: Staging) -> None:
        """Copy a run, rotated, to the end of the cached part, and move the lock there.

        Where the model keeps state per sequence, the run is copied piece by piece: each ends where
        state moves along.

        Raises:
            NoRoomError: there are no slots, or the state at the run's end is gone.
        """
        state = self._cache.state
        if state is None:
            self._copy_piece(turn, run, staging, None)
            return
        assert turn.plan is not None  # noqa: S101 - phase STAGING
        for move in turn.plan.states:
            if not staging.cursor < move.dest <= run[-1].dest_end:
                continue
            source = _sources(turn)[move.source]
            piece = tuple(_until(run, move.dest))
            anchor = state.anchor(source.keys(), turn.space_of(source), move.position)
            if anchor is not None and self._reads_window(turn, piece, staging.cursor):
                self._copy_piece(turn, piece, staging, anchor)
            elif move.dest == run[-1].dest_end:
                raise NoRoomError

    def _copy_piece(
        self, turn: Turn, run: Sequence[CopySegment], staging: Staging, anchor: Any
    ) -> None:
        """Copy a run, and the state that its source has at a node."""
        begin, end = staging.cursor, run[-1].dest_end
        slots = self._cache.take(end - begin)
        if slots is None:
            raise NoRoomError
        state: StateSlots | None = None
        try:
            if self._cache.state is not None:
                first = self._cache.state.first_windowed(begin, end)
                state = self._cache.state.take(slots, end - first)
                if state is None:
                    raise NoRoomError
            self._splice_run(turn, run, staging, slots, 0 if state is None else state.windowed)
            if state is not None and state.recurrent is not None:
                self._together(partial(self._pool.copy_state, anchor, state.recurrent))
            tokens = turn.req.origin_input_ids[: end + self._ahead]
            self._publisher.note(turn, tokens)
            node = self._cache.graft(turn.keys(tokens), staging.lock.node, slots, turn, state)
        except BaseException:
            if self._cache.state is not None:
                self._cache.state.give_back(slots, state)
            self._cache.give_back(slots)
            raise
        self._hold(staging, self._cache.lock(node), end)

    def _reads_window(self, turn: Turn, run: Sequence[CopySegment], begin: int) -> bool:
        """Return True if layers with a window have all that they read at a run's end."""
        state = self._cache.state
        assert state is not None  # noqa: S101 - the caller's contract
        first = state.first_windowed(begin, run[-1].dest_end)
        for copy in run:
            start, source = copy.start + max(0, first - copy.dest), _sources(turn)[copy.source]
            space = turn.space_of(source)
            if start < copy.end and not state.window_cached(source.keys(), space, start, copy.end):
                return False
        return True

    def _splice_run(
        self, turn: Turn, run: Sequence[CopySegment], staging: Staging, slots: Any, windowed: int
    ) -> None:
        """Copy what a run has after the cached part to ``slots``, the last also in windows."""
        begin, end = staging.cursor, run[-1].dest_end
        seams = [at - begin for at in _seams(turn, run) if at >= begin] if self._ahead else []
        for copy in run:
            source = staging.sources[copy.source].slots
            for pool, first in ((self._pool, begin), (self._pool.window, end - windowed)):
                dest = max(copy.dest, first)
                if pool is None or dest >= copy.dest_end:
                    continue
                start = copy.start + dest - copy.dest
                here, there = source[start : copy.end], slots[dest - begin : copy.dest_end - begin]
                if pool is not self._pool and self._cache.state is not None:
                    here, there = map(self._cache.state.windowed, (here, there))
                self._together(partial(pool.splice, here, there, start, dest))
                self._copied((copy.dest_end - dest) * pool.bytes_per_token)
        if seams:
            self._pool.blank_drafts(slots[seams])

    def _together(self, act: Callable[[], None]) -> None:
        """Change rows on all ranks, or on none: they must not hold different trees."""
        failure: Exception | None = None
        try:
            act()
        except Exception as error:
            failure = error
        if not self._agree(failure is None):
            raise failure or OtherRankError("the splice failed on another rank")

    def _hold(self, staging: Staging, lock: TreeLock, cursor: int) -> None:
        self._cache.unlock(staging.lock)
        staging.lock, staging.cursor = lock, cursor

    def _send_row(self, turn: Turn, end: int, admit: Admit) -> AddReqResult:
        row = StageRow(turn, end + self._ahead)
        row.init_next_round_input(self._cache)
        # SGLang would publish it in two steps, the first where it leaves another's path.
        row.swa_branching_seqlen = row.mamba_branching_seqlen = None
        verdict = admit(row)
        if row.lock is None and self._cache.state is not None:
            self._cache.state.release(row)
        if row.lock is not None and turn.staging is not None:
            turn.staging.row = row
            turn.loaded += max(0, row.prefix_len - turn.staging.cursor)
        return verdict

    def _take_over(self, row: StageRow) -> None:
        """Put the gap of a launched row into the tree, without waiting for the forward's result."""
        if row.launched and not row.skip_radix_cache_insert and not row.finished():
            try:
                checkpoint_kv_cache(row, self._cache)
            finally:
                # Its turn may be under another lineage by the time the row ends.
                row.skip_radix_cache_insert = True

    def row_computed(self, row: StageRow) -> None:
        """Record that a row's KV is in the tree; the row holds it locked until it is released."""
        staging = row.leyline.staging
        if staging is not None and staging.row is row and row.extend_end == row.end:
            self._hold(staging, self._cache.lock(row.last_node), row.end - self._ahead)
            row.complete = True

    def row_released(self, row: StageRow) -> None:
        """Record that a row ended. One without its gap, as after an abort, is sent again."""
        turn = row.leyline
        if turn.staging is not None and turn.staging.row is row and not row.complete:
            turn.staging.row = None
            turn.restarts += 1


def _edited(copies: Sequence[CopySegment], edit: ResolvedEdit) -> int:
    """Return the number of tokens that are copied for edits."""
    kinds = edit.kinds
    return sum(copy.length for copy in copies if not kinds or kinds[copy.source] is None)


def _sources(turn: Turn) -> tuple[SourceTurn, ...]:
    """Return the sources of a turn that copies."""
    assert turn.checked is not None and turn.checked.edit is not None  # noqa: S101 - it copies
    return turn.checked.edit.sources


def _until(run: Sequence[CopySegment], dest: int) -> Iterator[CopySegment]:
    """Yield the part of a run in front of a position of the prompt."""
    for copy in run:
        end = min(copy.end, copy.start + dest - copy.dest)
        if end > copy.start:
            yield CopySegment(copy.source, copy.start, end, copy.dest)


def _seams(turn: Turn, run: Sequence[CopySegment]) -> Iterator[int]:
    """Yield the places of copied slots after which another token stands than in their source.

    The draft model's KV in such a slot has read the source's token.
    """
    prompt = turn.req.origin_input_ids
    for copy in run:
        tokens = _sources(turn)[copy.source].tokens
        if tokens[copy.end : copy.end + 1] != prompt[copy.dest_end : copy.dest_end + 1]:
            yield copy.dest_end - 1


def release(cache: LeylineRadixCache, turn: Turn) -> None:
    """Give back all that a turn's splice holds; the copies stay, evictable."""
    if turn.staging is not None:
        staging, turn.staging = turn.staging, None
        _let_go(cache, staging)


def release_sources(cache: LeylineRadixCache, turn: Turn) -> None:
    """Give back the sources; the copies stay locked."""
    if turn.staging is not None:
        for source in turn.staging.sources:
            cache.unlock(source.lock)
        turn.staging.sources.clear()


def _let_go(cache: LeylineRadixCache, staging: Staging) -> None:
    for source in staging.sources:
        cache.unlock(source.lock)
    cache.unlock(staging.lock)


def as_admitted(plan: Plan, reused: int, loaded: int = 0) -> tuple[Plan, TokenCounts]:
    """Return a plan as executed, now that its request is admitted.

    Args:
        plan: the turn's plan.
        reused: tokens that the request itself doesn't compute. They are fewer than planned if
            copies were evicted before it was admitted; the rest of those is prefilled.
        loaded: tokens of its gaps that were cached by the time they were to be computed.
    """
    kept = tuple(copy for copy in plan.copies if copy.dest < reused)
    kept = tuple(
        CopySegment(c.source, c.start, c.start + min(c.length, reused - c.dest), c.dest)
        for c in kept
    )
    executed = replace(plan, copies=kept)
    copied = executed.copied
    staged = sum(step.end - step.start for step in plan.prefills[:-1])
    prefilled = min(plan.length - reused + staged - loaded, plan.length - copied)
    counts = TokenCounts(
        prompt=plan.length,
        prefix=plan.length - copied - prefilled,
        spliced=executed.spliced,
        reused=executed.reused,
        prefilled=prefilled,
    )
    lost = plan.spliced - executed.spliced
    return replace(executed, evicted=plan.evicted + lost), counts
