"""Admission of requests with envelopes: a turn is planned, spliced, and runs.

Its copies are made, and its forget is carried out, before SGLang admits it like any request. On any
error it is admitted as an ordinary prefill.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Mapping

from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.mem_cache.base_prefix_cache import MatchResult

from leyline_engine.admit.content_reuse import ContentReuse
from leyline_engine.admit.edits import EditRefusedError
from leyline_engine.admit.plan import plan_turn
from leyline_engine.admit.rules import CheckedRequest
from leyline_engine.contract import Reason
from leyline_engine.records.publications import Publication
from leyline_engine.records.sources import SessionKey, SourceTurn
from leyline_engine.rows.pool import OriginGoneError
from leyline_engine.scheduler.containment import contained
from leyline_engine.sglang.fallback import Fallback
from leyline_engine.sglang.matching import Matcher, reach
from leyline_engine.sglang.radix import LeylineRadixCache
from leyline_engine.sglang.splicer import (
    MAX_RESTARTS,
    Admit,
    NoRoomError,
    Splicer,
    release,
)
from leyline_engine.sglang.stage_row import StageRow
from leyline_engine.sglang.turn import Phase, Turn
from leyline_engine.sglang.turn_forgets import TurnForgets

log = logging.getLogger(__name__)

_PRESSURE = "no slots for the copies beside their locked sources"
_FAILED = "the splice failed in the engine"
_GAVE_WAY = "as-computed keys gave way while the splice was made"


class Admission:
    """Brings turns from the queue to their first forward.

    Args:
        cache: the tree.
        splicer: makes copies; None if the pool's rows can't be touched.
        matcher: finds cached prefixes.
        fallback: checks requests.
        reuse: finds content that is cached elsewhere.
        distrusted: sessions whose next turn may reuse nothing.
        forgets: carries out what turns demand to forget before they run.
        turns: turns that wait or run, by request.
        admitted: called with a turn whose request runs from now on.
    """

    def __init__(
        self,
        cache: LeylineRadixCache,
        splicer: Splicer | None,
        *,
        matcher: Matcher,
        fallback: Fallback,
        reuse: ContentReuse,
        distrusted: Container[SessionKey | None],
        forgets: TurnForgets,
        turns: Mapping[str, Turn],
        admitted: Callable[[Turn], None],
    ) -> None:
        self._cache = cache
        self._splicer = splicer
        self._matcher = matcher
        self._fallback = fallback
        self._reuse = reuse
        self._distrusted = distrusted
        self._forgets = forgets
        self._turns = turns
        self._admitted = admitted

    def admit(self, turn: Turn, admit: Admit, room: Callable[[], int]) -> AddReqResult:
        """Admit a turn's request, or do the next step that it needs first.

        Args:
            turn: a turn that waits.
            admit: SGLang's own admission.
            room: tokens that admission has left.

        Returns:
            SGLang's result for its budget; ``CONTINUE`` also for a turn that has to wait.
        """
        began = time.perf_counter_ns()
        verdict = self._prepare(turn, admit, room)
        turn.spent_ns += time.perf_counter_ns() - began
        if verdict is None and turn.rests:
            turn.rests, verdict = False, AddReqResult.CONTINUE
        req = turn.req
        if verdict is not None:
            if self._cache.state is not None:
                self._cache.state.release(req)
            return verdict
        req.init_next_round_input(self._cache)
        result = admit(req)
        if req.lock is None and self._cache.state is not None:
            self._cache.state.release(req)
        if turn.phase is Phase.READY:
            if req.lock is not None:
                turn.move(Phase.RUNNING)
                with contained("writing a receipt"):
                    # The request holds a lock of its own.
                    release(self._cache, turn)
                    self._admitted(turn)
            elif result is AddReqResult.NO_TOKEN:
                release(self._cache, turn)
        return result

    def _prepare(self, turn: Turn, admit: Admit, room: Callable[[], int]) -> AddReqResult | None:
        """Bring a turn to READY, if possible."""
        try:
            if turn.phase is Phase.NEW and not self._begin(turn, room):
                return AddReqResult.NO_TOKEN
            if turn.phase is Phase.STAGING and self._splicer is not None:
                waiting = self._splicer.advance(turn, admit, room)
                if waiting is not None:
                    return waiting
                self._forgets.ready(turn)
        except OriginGoneError:
            return self._plan_again(turn, admit, room)
        except NoRoomError:
            if self._restart_without_reuse(turn):
                return self._prepare(turn, admit, room)
            self._forgets.fall_back(turn, Reason.SOURCE_EVICTED, _PRESSURE)
        except Exception:
            if self._restart_without_reuse(turn):
                log.exception("reuse failed; the request runs without it")
                return self._prepare(turn, admit, room)
            self.fail(turn)
        return None

    def _plan_again(self, turn: Turn, admit: Admit, room: Callable[[], int]) -> AddReqResult | None:
        """Begin a splice again whose sources lost as-computed keys since it was planned."""
        if turn.restarts >= MAX_RESTARTS:
            self._forgets.fall_back(turn, Reason.SOURCE_EVICTED, _GAVE_WAY)
            return None
        release(self._cache, turn)
        self._renew(turn)
        return self._prepare(turn, admit, room)

    def _restart_without_reuse(self, turn: Turn) -> bool:
        """Make a turn that copies for reuse new again, without that; returns False for others.

        Copies that were made stay in the tree, evictable, under the turn's own lineage.
        """
        checked = turn.checked
        staged = turn.phase in {Phase.NEW, Phase.STAGING}
        if not (staged and turn.reuses and checked is not None and checked.copies_hits):
            return False
        release(self._cache, turn)
        turn.reuses = False
        self._renew(turn)
        return True

    def _renew(self, turn: Turn) -> None:
        """Let a turn begin again."""
        turn.restarts, turn.carried, turn.plan = turn.restarts + 1, None, None
        turn.loaded = 0
        # Its next path may be under another lineage, of which nothing is noted.
        turn.lineage, turn.noted = (), 0
        if turn.phase is not Phase.NEW:
            turn.move(Phase.NEW)

    def _begin(self, turn: Turn, room: Callable[[], int]) -> bool:
        """Check a new turn and plan its edit; returns False if there is no room for it now."""
        prompt = turn.req.origin_input_ids
        checked = self._fallback.check(turn)
        if checked.forgets:
            self._forgets.withhold_session(turn)
        if turn.session in self._distrusted:
            turn.gated, turn.reuses = True, False
        limit = len(prompt) - 1
        match = self._matcher.best(turn, checked, prompt, limit)
        turn.plan = plan_turn(len(prompt), match.device_prefix_len, (), (), sink=0)
        turn.checked = found = self._searched(turn, checked, reach(match))
        try:
            self._splice(turn, found, match, room)
        except NoRoomError:
            if self._cache.in_pages(turn.plan.prefilled) > room():
                return False  # nor is there room for an ordinary prefill: it waits as it is
            raise
        return True

    def _searched(self, turn: Turn, checked: CheckedRequest, prefix: int) -> CheckedRequest:
        """Return a request with what is found of its content elsewhere, if it asks for that."""
        if self._splicer is None:
            return checked
        if not turn.reuses:
            return checked.without_reuse()

        def available(source: SourceTurn) -> int:
            path = Publication(source.keys(), space=turn.space_of(source))
            return self._cache.slot_count(path, self._cache.allowed_length(path.keys))

        try:
            return self._reuse.search(checked, prefix, available)
        except Exception:
            log.exception("content could not be looked for; the request runs without reuse")
            return checked.without_reuse()

    def _splice(
        self, turn: Turn, checked: CheckedRequest, match: MatchResult, room: Callable[[], int]
    ) -> None:
        if checked.edit is None or self._splicer is None:
            self._forgets.ready(turn)
        else:
            self._splicer.begin(turn, checked, match, room)

    def fail(self, turn: Turn) -> None:
        """Handle an error of the engine's own: SGLang's loop must not end with it."""
        log.exception("a splice failed; the request runs as an ordinary prefill")
        self._forgets.fall_back(turn, Reason.TRANSFORM_FAILED, _FAILED)

    def row_computed(self, row: StageRow) -> None:
        """Record that the gap of a stage row is in the tree, and locked by the row."""
        if self._splicer is not None:
            with contained("taking over a computed gap"):
                self._splicer.row_computed(row)

    def row_released(self, row: StageRow) -> None:
        """Record that a stage row gave back its slots and its lock."""
        if self._splicer is None:
            return
        try:
            self._splicer.row_released(row)
        except Exception:
            staging = row.leyline.staging
            if staging is not None and staging.row is row:
                self.fail(row.leyline)
            else:
                log.exception("a gap's row could not be let go; its turn doesn't wait for it")

    def give_way(self) -> bool:
        """Free the memory that waiting turns hold; returns False if they held nothing.

        A splice that gave way begins again, a few times at most.
        """
        gave = False
        for turn in tuple(self._turns.values()):
            staging = turn.staging
            # A row that is done holds nothing, but its turn has the gap locked.
            if staging is None or (staging.row is not None and not staging.row.complete):
                continue
            release(self._cache, turn)
            gave = True
            if turn.phase is not Phase.STAGING:
                continue
            self._renew(turn)
            if turn.restarts <= MAX_RESTARTS:
                continue
            if turn.reuses and turn.checked is not None and turn.checked.copies_hits:
                turn.reuses, turn.restarts = False, 0
            else:
                turn.refusal = EditRefusedError(Reason.SOURCE_EVICTED, _PRESSURE)
        return gave
