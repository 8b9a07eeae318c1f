"""Steps of turns whose copies wait for gaps: where a chunk ends, and where the next one begins.

A gap between two runs of copies is computed by the request itself. Its prefill is cut at the end of
the gap; in the next step the request continues after the next run, whose rows the workers copy in
front of that step's forward::

    prompt   0 ── prefix ──┬── gap ──┬══ run ══┬── gap ──┬══ run ══┬── rest ── n
    step     cached        │ chunk 1 │         │ chunk 2 │         │ chunk 3
    copied                           └ step 2 ─┘         └ step 3 ─┘

So a gap costs one forward, and rows needn't begin or end at a block's edge.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from leyline_engine.contract import CopySegment
from leyline_engine.vllm.admission import Admission
from leyline_engine.vllm.orders import Orders, RowMove, Slots, block_slots
from leyline_engine.vllm.turn import Phase, Staging, Turn

log = logging.getLogger(__name__)


class Stepper:
    """Advances the staged turns of one scheduler.

    Args:
        admission: takes back the blocks that turns copied from.
        blocks_of: returns the ids of a request's blocks, by its id.
        block: tokens per block.
        copied: called with the number of rows that a step copies.
    """

    def __init__(
        self,
        admission: Admission,
        blocks_of: Callable[[str], Sequence[int]],
        block: int,
        *,
        copied: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._admission = admission
        self._blocks_of = blocks_of
        self._block = block
        self._copied = copied
        self._orders = Orders()
        self._finished: list[Turn] = []
        """Turns whose last copies are among the orders: their sources are held until then."""

    def begin(self, turn: Turn, copied: int) -> None:
        """Order the copies that follow a turn's prefix; vLLM has given it blocks.

        Args:
            copied: tokens after the prefix that vLLM takes for loaded; 0 if a gap follows.
        """
        staging = turn.staging
        assert staging is not None  # noqa: S101 - it was planned
        turn.move(Phase.STAGING)
        if copied:
            self._copy(turn, staging)

    def advance(self, turn: Turn) -> None:
        """Let a running turn continue after its next run, once the gap in front is launched."""
        staging = turn.staging
        if staging is None or staging.next_dest != turn.req.num_computed_tokens:
            return
        run = staging.runs[0]
        length = run[-1].dest_end - run[0].dest
        turn.req.num_computed_tokens += length
        staging.begun = True
        _count_cached(turn.req, length)

    def capped(self, turn: Turn, computed: int, tokens: int) -> int:
        """Return the size of a turn's next chunk: it ends where the next run begins.

        Args:
            computed: tokens that the request has rows for.
            tokens: the chunk that vLLM chose.
        """
        runs = turn.staging.runs if turn.staging is not None else ()
        dest = next((run[0].dest for run in runs if run[0].dest > computed), None)
        return tokens if dest is None else min(tokens, dest - computed)

    def scheduled(self, turns: Mapping[str, Turn], requests: Collection[str]) -> None:
        """Order the copies of turns that continue after a run in this step.

        Args:
            requests: ids of the requests that run in it.
        """
        for request in requests:
            turn = turns.get(request)
            if turn is None or turn.staging is None or not turn.staging.begun:
                continue
            self._orders.advanced[request] = turn.staging.runs[0][-1].dest_end
            self._copy(turn, turn.staging)

    def spoil(self, turn: Turn, start: int, end: int) -> None:
        """Have the workers report positions of a turn as failed that vLLM takes for loaded."""
        blocks = self._blocks_of(turn.req.request_id)[start // self._block : -(-end // self._block)]
        self._orders.spoilt.extend(blocks)

    def take(self, erased: Slots) -> Orders:
        """Return the step's orders, and give back what their copies needed.

        Args:
            erased: rows to overwrite first.
        """
        orders, self._orders = self._orders, Orders()
        orders.erase = erased
        for turn in self._finished:
            self._admission.release(turn)
        self._finished.clear()
        return orders

    def _copy(self, turn: Turn, staging: Staging) -> None:
        run, staging.begun = staging.runs.pop(0), False
        try:
            own = block_slots(list(self._blocks_of(turn.req.request_id)), self._block)
            moves = [self._move(copy, staging, own) for copy in run]
        except Exception:
            log.exception("copies could not be ordered; their tokens are computed instead")
            self.spoil(turn, run[0].dest, run[-1].dest_end)
        else:
            self._orders.moves.extend(moves)
            self._copied(sum(copy.length for copy in run))
        if not staging.runs:
            turn.move(Phase.RUNNING)
            self._finished.append(turn)

    def _move(self, copy: CopySegment, staging: Staging, own: Slots) -> RowMove:
        first = copy.start // self._block
        found = staging.sources[copy.source][first : -(-copy.end // self._block)]
        slots = block_slots([int(block.block_id) for block in found], self._block)
        begin = copy.start - first * self._block
        return RowMove(
            source=slots[begin : begin + copy.length],
            target=own[copy.dest : copy.dest_end],
            source_start=copy.start,
            dest_start=copy.dest,
        )


def _count_cached(request: Any, tokens: int) -> None:
    """Add tokens to those that vLLM reports as cached, unless it has reported already.

    As vLLM does, it counts a preempted request's first prefill only.
    """
    stats = request.prefill_stats
    if stats is not None and request.num_preemptions <= 0:
        stats.set(
            stats.num_prompt_tokens,
            stats.num_local_cached_tokens,
            stats.num_external_cached_tokens + tokens,
        )


def uncount_cached(request: Any) -> None:
    """Remove copied tokens from those that vLLM reports as cached: they are computed instead."""
    stats = request.prefill_stats
    if stats is not None:
        stats.set(stats.num_prompt_tokens, stats.num_local_cached_tokens, 0)
