"""SGLang's admission policy, extended for requests with an envelope."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

from leyline_engine.sglang.engine import SchedulerEngine


class LeylinePrefillAdder(PrefillAdder):
    """Splices before it admits; requests without an envelope are admitted as in stock SGLang."""

    def add_one_req(
        self, req: Any, has_chunked_req: bool, truncation_align_size: int | None
    ) -> AddReqResult:
        engine: SchedulerEngine = self.tree_cache.leyline
        turn = engine.turn_of(req)

        def admit(candidate: Any) -> AddReqResult:
            return super(LeylinePrefillAdder, self).add_one_req(
                candidate, has_chunked_req, truncation_align_size
            )

        result = admit(req) if turn is None else engine.admission.admit(turn, admit, self._room)
        if result is AddReqResult.NO_TOKEN and self._nothing_runs():
            engine.give_way()
            # It may share less with a claim than when it was queued, and never fit any more.
            engine.claims.recheck |= bool(engine.claims.keeper)
        return result

    def _room(self) -> int:
        """Return the number of tokens not promised to any request.

        The rest of a prompt that is admitted in chunks counts as promised.
        """
        room: int = self.rem_total_tokens
        for req in self.can_run_list:
            room -= self.ceil_paged_tokens(len(req.full_untruncated_fill_ids) - req.extend_end)
        return room

    def _nothing_runs(self) -> bool:
        running = self.running_batch
        return not self.can_run_list and (running is None or running.is_empty())
