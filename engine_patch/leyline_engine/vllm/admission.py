"""Plans of turns: what is cached of a prompt, what is copied to it, and the blocks that this needs.

vLLM asks for a waiting request's cached blocks, then for tokens that a connector brings, and then
gives it blocks, or leaves it waiting. A plan is made anew each time, as blocks come and go; the
request's payload is checked once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from leyline_engine.admit.edits import EditRefusedError, ResolvedEdit
from leyline_engine.admit.plan import (
    Plan,
    clip_copies,
    copy_runs,
    plan_turn,
)
from leyline_engine.admit.rules import CheckedRequest, Rules, extend_lineage
from leyline_engine.contract import ATTENTION_SINK, CopySegment, LineageRun, Reason
from leyline_engine.records.lineage import runs_before
from leyline_engine.records.sources import SourceTurn
from leyline_engine.vllm.blocks import BlockCache
from leyline_engine.vllm.retained import RetainedKeys
from leyline_engine.vllm.turn import Phase, Staging, Turn

log = logging.getLogger(__name__)

_PRESSURE = "no blocks for the copies beside their sources"
_FAILED = "the splice could not be planned"
_UNCHECKED = "the edit could not be checked"


class Admission:
    """Plans the turns of one scheduler.

    Args:
        cache: the blocks.
        rules: decisions over the registry and the ledger.
        keys: keys of the retained turns.
        lay: lays copies and prefills over a prompt, at the server's costs.
    """

    def __init__(
        self,
        cache: BlockCache,
        rules: Rules,
        keys: RetainedKeys,
        *,
        lay: Callable[..., Plan],
    ) -> None:
        self._cache = cache
        self._rules = rules
        self._keys = keys
        self._lay = lay

    # The cached prefix.

    def look_up(self, turn: Turn) -> int:
        """File a new turn under the map with the longest cached prefix.

        Returns:
            The number of blocks that the request may take from the cache.
        """
        checked = self._checked(turn)
        within = (len(turn.prompt) - 1) // self._cache.block
        best = len(self._cache.find(turn.keys.plain, within))
        lineage: tuple[LineageRun, ...] = ()
        for runs in self._rules.maps(checked):
            clean = min(within, self._rules.clean_length(checked, runs) // self._cache.block)
            found = len(self._cache.find(turn.keys.under(runs, turn.scope), clean))
            if found > best:
                best, lineage = found, runs_before(runs, found * self._cache.block)
        turn.file_under(lineage)
        return best

    def _checked(self, turn: Turn) -> CheckedRequest:
        """Return a turn's request, checked; its edit is refused if that fails."""
        if turn.checked is None:
            turn.checked = self._check(turn)
        return turn.checked

    def _check(self, turn: Turn) -> CheckedRequest:
        try:
            checked = self._rules.check(turn.prompt, turn.payload, turn.refusal)
        except Exception:
            log.exception("an edit could not be checked; the request runs as an ordinary prefill")
            refusal = EditRefusedError(Reason.TRANSFORM_FAILED, _UNCHECKED)
            return CheckedRequest(turn.prompt, turn.payload, None, refusal, (), None)
        sources = checked.edit.sources if checked.edit is not None else ()
        if all(source.extra_key == turn.space.extra_key for source in sources):
            return checked
        detail = "a source was computed with another adapter"
        refusal = EditRefusedError(Reason.INCOMPATIBLE_IDENTITY, detail)
        return replace(checked, edit=None, refusal=refusal)

    # The copies.

    def plan(self, turn: Turn, prefix: int) -> int:
        """Plan a new turn, and hold the blocks that it copies from.

        Args:
            prefix: tokens that vLLM found cached, whole blocks.

        Returns:
            The number of tokens after the prefix that are copied before the first forward.
        """
        turn.prefix = prefix
        turn.plan = plan_turn(len(turn.prompt), prefix, (), (), sink=0)
        checked = self._checked(turn)
        if checked.edit is None or turn.withheld:
            return 0
        try:
            return self._splice(turn, checked, checked.edit)
        except Exception:
            log.exception("a splice failed; the request runs as an ordinary prefill")
            self.give_up(turn, Reason.TRANSFORM_FAILED, _FAILED)
            return 0

    def _splice(self, turn: Turn, checked: CheckedRequest, edit: ResolvedEdit) -> int:
        sources = {at: self._cached(source) for at, source in enumerate(edit.sources)}
        plan = self._plan(turn, edit, [len(found) for found in sources.values()])
        turn.plan = plan
        if not plan.copies:
            return 0
        pinned = self._held_by(plan.copies, sources)
        if not self._fits(turn, plan, pinned):
            return 0
        carried = self._rules.carry(checked, turn.lineage, plan)
        first, *_ = runs = copy_runs(plan.copies)
        loaded = first[-1].dest_end - plan.prefix if first[0].dest == plan.prefix else 0
        self._cache.pin(pinned)
        turn.staging = Staging(sources, pinned, runs, loaded)
        turn.carried = carried
        turn.move(Phase.PLANNED)
        turn.file_under(extend_lineage(turn.lineage, carried))
        return loaded

    def _plan(self, turn: Turn, edit: ResolvedEdit, blocks: Sequence[int]) -> Plan:
        """Lay a turn's copies over its prompt.

        What was never cached, such as a turn's last and partial block, doesn't count as evicted.
        """
        block = self._cache.block
        available = [count * block for count in blocks]
        ends = [
            max(count, (len(source.tokens) - 1) // block * block)
            for count, source in zip(available, edit.sources, strict=True)
        ]
        return self._lay(
            len(turn.prompt),
            turn.prefix,
            clip_copies(edit.copies, ends),
            available,
            sink=max(edit.payload.sink, ATTENTION_SINK),
            kinds=edit.kinds,
        )

    def _cached(self, source: SourceTurn) -> list[Any]:
        """Return a source's cached blocks; those that this step's forward writes can't be copied
        in front of it."""
        return self._cache.written(self._cache.find(self._keys.of(source)))

    def _held_by(self, copies: Sequence[CopySegment], sources: dict[int, list[Any]]) -> list[Any]:
        """Return the blocks that copies read, each once."""
        block, held = self._cache.block, dict[int, Any]()
        for copy in copies:
            for found in sources[copy.source][copy.start // block : -(-copy.end // block)]:
                held[int(found.block_id)] = found
        return list(held.values())

    def _fits(self, turn: Turn, plan: Plan, pinned: Sequence[Any]) -> bool:
        """Return True if there is room for the prompt beside the blocks that it copies from.

        If only that is missing, the turn is prefilled. If there is no room for the prompt, either,
        it waits as it is.
        """
        needed = -(-len(turn.prompt) // self._cache.block) - plan.prefix // self._cache.block
        if needed <= self._cache.free - self._cache.idle(pinned):
            return True
        if needed <= self._cache.free:
            self.give_up(turn, Reason.SOURCE_EVICTED, _PRESSURE)
        return False

    def give_up(self, turn: Turn, reason: Reason, detail: str) -> None:
        """Make a turn an ordinary prefill; its receipt will give the reason."""
        self.release(turn)
        if turn.checked is not None:
            turn.checked = turn.checked.refused(reason, detail)
        turn.carried = None
        turn.plan = plan_turn(len(turn.prompt), turn.prefix, (), (), sink=0)
        turn.file_under(runs_before(turn.lineage, turn.prefix))

    def release(self, turn: Turn) -> None:
        """Give back the blocks that a turn copies from."""
        if turn.staging is not None:
            staging, turn.staging = turn.staging, None
            self._cache.unpin(staging.pinned)

    def withdraw(self, turn: Turn) -> None:
        """Make a turn new again: vLLM gave it no blocks, or took them back."""
        self.release(turn)
        turn.carried = turn.plan = None
        turn.file_under(())
        if turn.phase is not Phase.NEW:
            turn.move(Phase.NEW)
