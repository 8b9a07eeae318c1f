"""The way back from a splice: its request runs as an ordinary prefill, and its receipt says why."""

from __future__ import annotations

import logging
from dataclasses import replace

from leyline_engine.admit.edits import EditRefusedError
from leyline_engine.admit.plan import Plan
from leyline_engine.admit.rules import CheckedRequest, Rules
from leyline_engine.contract import Reason
from leyline_engine.records.publications import Publication
from leyline_engine.scheduler.containment import contained
from leyline_engine.sglang.forgetting import Forgetter
from leyline_engine.sglang.publishing import KeptOut
from leyline_engine.sglang.radix import LeylineRadixCache
from leyline_engine.sglang.splicer import release
from leyline_engine.sglang.turn import Turn

log = logging.getLogger(__name__)


class Fallback:
    """Makes turns ordinary prefills if their edits can't be checked or executed.

    Args:
        cache: the tree.
        rules: decisions over the registry and the ledger.
        forgetter: removes copies of splices that were given up.
        kept_out: takes stage rows that continue without their turns.
    """

    def __init__(
        self, cache: LeylineRadixCache, rules: Rules, forgetter: Forgetter, *, kept_out: KeptOut
    ) -> None:
        self._cache = cache
        self._rules = rules
        self._forgetter = forgetter
        self._kept_out = kept_out

    def check(self, turn: Turn) -> CheckedRequest:
        """Return a turn's request, checked; its edit is refused if that fails."""
        prompt = turn.req.origin_input_ids
        try:
            checked = self._rules.check(prompt, turn.payload, turn.refusal, turn.reuse)
        except Exception:
            log.exception("an edit could not be checked; the request runs as an ordinary prefill")
            refusal = EditRefusedError(Reason.TRANSFORM_FAILED, "the edit could not be checked")
            return CheckedRequest(prompt, turn.payload, None, refusal, (), None)
        sources = checked.edit.sources if checked.edit is not None else ()
        if all(source.extra_key == turn.space.extra_key for source in sources):
            return checked
        detail = "a source was computed with another adapter"
        refusal = EditRefusedError(Reason.INCOMPATIBLE_IDENTITY, detail)
        return replace(checked, edit=None, refusal=refusal)

    def strip(self, turn: Turn, reason: Reason, detail: str) -> None:
        """Reduce a turn to its prompt, and drop the copies that were made for it."""
        made = 0
        if turn.staging is not None:
            made = turn.staging.cursor
            if turn.staging.row is not None:
                # It continues under keys that are no longer its turn's.
                self._kept_out.add(turn.staging.row)
        kept = turn.plan.prefix if turn.plan is not None else 0
        prompt = turn.req.origin_input_ids
        with contained("giving a splice up"):
            release(self._cache, turn)
            if made > kept and turn.lineage:
                path = Publication(turn.keys(prompt), turn.lineage, turn.space)
                self._forgetter.remove(path, kept)
        turn.carried, turn.lineage = None, ()
        only_reused = turn.checked is not None and turn.checked.only_reuses
        checked = self.check(turn)
        turn.checked = checked.without_reuse() if only_reused else checked.refused(reason, detail)
        turn.plan = Plan(len(prompt), 0, (), ())
