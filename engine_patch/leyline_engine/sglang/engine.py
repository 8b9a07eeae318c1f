"""Leyline in one SGLang scheduler: requests with envelopes, from the queue to their end.

A splice is applied once, when the scheduler would admit the request. Ranks of one replica see the
same requests in the same order and decide alike: nothing here reads a clock to decide, or chance.
On any error the request runs as an ordinary prefill, and its receipt gives the reason.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import msgspec
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult

from leyline_engine.claims.limits import Limits
from leyline_engine.contract import Capability, ClaimRefusal, LineageRun, Reason
from leyline_engine.edits import EditRefusedError, forgets
from leyline_engine.energy import EnergyAccount
from leyline_engine.ledger import SpanLedger
from leyline_engine.lineage import fold_keys, runs_before
from leyline_engine.metrics import EngineMetrics
from leyline_engine.plan import Plan, plan_turn
from leyline_engine.rules import CheckedRequest, Rules
from leyline_engine.sglang.accounts import Accounts
from leyline_engine.sglang.census import open_census
from leyline_engine.sglang.channel import Sender
from leyline_engine.sglang.claims import NO_ADMIT, ClaimDesk
from leyline_engine.sglang.containment import contained
from leyline_engine.sglang.forgetting import Forgetter, Forgotten
from leyline_engine.sglang.hints import take_hints
from leyline_engine.sglang.metrics import Readings
from leyline_engine.sglang.pool import SplicePool
from leyline_engine.sglang.publications import (
    MIN_TOKENS,
    NOBODY,
    PER_SLOT,
    Publication,
    Publications,
    Space,
)
from leyline_engine.sglang.radix import LeylineRadixCache
from leyline_engine.sglang.ranks import Replica
from leyline_engine.sglang.splicer import MAX_RESTARTS, Admit, NoRoomError, Splicer, StageRow
from leyline_engine.sglang.turn import Phase, Turn
from leyline_engine.sources import SessionKey, SourceRegistry

log = logging.getLogger(__name__)

_PRESSURE = "no slots for the copies beside their locked sources"
_FAILED = "the splice failed in the engine"


class SchedulerEngine:
    """Registry, ledger and turns of one scheduler process; see :class:`.radix.Listener`.

    Args:
        cache: SGLang's tree, which reports to this engine.
        pool: rows of the KV pool; None if the model or the pool isn't on the allow-list.
        capability: capability of this engine.
        sender: takes receipts to the HTTP process.
        metrics: this scheduler's counters.
        secret: secret that signs envelopes; None takes them unsigned.
        salt: salt of lineages' names; the same on all ranks of the replica.
        min_copy: copies shorter than this, in tokens, are prefilled.
        agree: returns True if all tensor-parallel ranks succeeded; takes this rank's success.
        limits: limits of what may be claimed.
        energy: shares of requests, if energy is counted.
        replica: this one of the server's data-parallel replicas.
    """

    def __init__(
        self,
        cache: LeylineRadixCache,
        pool: SplicePool | None,
        capability: Capability,
        sender: Sender,
        metrics: EngineMetrics,
        *,
        secret: str | None,
        salt: bytes,
        min_copy: int,
        agree: Callable[[bool], bool] = bool,
        limits: Limits | None = None,
        energy: EnergyAccount | None = None,
        replica: Replica = Replica(),  # noqa: B008 - immutable
    ) -> None:
        self.cache = cache
        self._replica = replica
        self._metrics = metrics
        self.capability = capability
        self.registry = SourceRegistry(secret=secret)
        self.ledger = SpanLedger()
        usable = int(cache.token_to_kv_pool_allocator.size)
        self.publications = Publications(
            max_tokens=max(MIN_TOKENS, PER_SLOT * usable), cached=cache.cached_length
        )
        self._accounts = Accounts(self.registry, self.ledger, sender, metrics)
        self._secret = secret
        self._rules = Rules(self.registry, self.ledger, splices=pool is not None, salt=salt)
        self._forgetter = Forgetter(
            cache,
            self.registry,
            self.ledger,
            self.publications,
            erases=pool is not None,
            told=metrics.forgot,
        )
        self._splicer = (
            None
            if pool is None
            else Splicer(
                cache,
                pool,
                self._rules,
                min_copy=min_copy,
                entered=self._enter,
                publishing=self._note,
                agree=agree,
                copied=metrics.copied,
            )
        )
        self.claims = ClaimDesk(
            cache,
            self.registry,
            usable=usable,
            page_size=int(cache.page_size),
            limits=limits,
        )
        # Its request holds a turn; SGLang may drop a request without notice.
        self._turns: WeakValueDictionary[str, Turn] = WeakValueDictionary()
        self._kept_out: WeakSet[Any] = WeakSet()
        census = open_census(cache) if metrics.collects else None
        self.readings = Readings(
            metrics,
            self.registry,
            self.ledger,
            self.claims.keeper,
            census=census,
            energy=energy,
        )
        cache.attach(self, pool, self.claims.shelf, census)
        self._accounts.announce(capability)

    # Requests come and go.

    def receive(self, req: Any) -> None:
        """Read the envelope of a request that reached the scheduler, if it has one."""
        hints = self._replica.checked(take_hints(req, self._secret))
        if hints.nameless:
            self._keep_out(req)
        if hints.message_id is None:
            return
        refusal = None
        if hints.invalid is not None:
            refusal = EditRefusedError(hints.invalid, hints.detail)
        turn = Turn(req, hints.message_id, hints.payload, refusal, hints.skipped)
        req.leyline = turn
        self._turns[req.rid] = turn
        if not self.claims.admits(turn):
            turn.private = req.skip_radix_cache_insert = True
            if turn.payload is not None and turn.payload.sources:
                turn.refusal = EditRefusedError(Reason.REFUSED_BY_CLAIM, NO_ADMIT)

    def refuse(self, req: Any, *, began: bool = False) -> ClaimRefusal | None:
        """Return why a request can't run, or continue, before a claim ends; note it in its receipt.

        Args:
            began: True if it ran already.
        """
        turn = self.turn_of(req)
        refusal: ClaimRefusal | None = None

        def cached() -> list[int]:
            return self.cached_slots(req)

        with contained("asking whether claims leave room"):
            if turn is not None and forgets(turn.payload) and self.claims.blocks(req, turn, cached):
                # The request may forget what is in its way, and no claim keeps that.
                self._forget_first(turn)
            refusal = self.claims.refuse(req, turn, cached)
            if refusal is not None:
                self._metrics.refused()
                if turn is not None:
                    self._accounts.refused(turn, refusal, began=began)
        return refusal

    def refuse_running(self, req: Any) -> ClaimRefusal:
        """Return the refusal of a request that can't continue beside claims and other requests."""
        turn = self.turn_of(req)
        refusal = self.refuse(req, began=True)
        if refusal is None:
            refusal = self.claims.crowded(req, turn)
            self._metrics.refused()
            if turn is not None:
                self._accounts.refused(turn, refusal, began=True)
        return refusal

    def evicted(self, tokens: int) -> None:
        """Record an eviction; see :class:`.radix.Listener`."""
        self._metrics.evicted(tokens)

    def room(self) -> int:
        """Return the number of slots that are free or can be evicted."""
        free = self.cache.token_to_kv_pool_allocator.available_size()
        return int(free + self.cache.evictable_size())

    def cached_slots(self, req: Any) -> list[int]:
        """Return the slots of a waiting request's cached prefix."""
        turn = self.turn_of(req)
        tokens = req.origin_input_ids + req.output_ids
        limit = len(tokens) - 1
        if turn is None:
            found = self.cache.find(tokens, Space(req.extra_key, req.cache_salt), limit)
        elif turn.phase is Phase.NEW:
            found = self._best_match(turn, self._glance(turn), tokens, limit)
        else:
            found = self.cache.find(turn.keys(tokens), turn.space, limit)
        path = self.cache.path_device_indices(found.last_device_node)
        slots: list[int] = path[: found.device_prefix_len].tolist()
        return slots

    def turn_of(self, req: Any) -> Turn | None:
        """Return the state of a request with an envelope, or of the turn that a row works for."""
        turn: Turn | None = getattr(req, "leyline", None)
        return turn

    def dropped(self, rid: str) -> None:
        """Record that a request won't run, or continue; one that holds KV is released next."""
        self.readings.dropped(rid)
        turn = self._turns.get(rid)
        if turn is None or turn.req.kv.holds_kv:
            return
        with contained("dropping a turn"):
            self._turns.pop(rid, None)
            self._release(turn)
            turn.move(Phase.ENDED)
            self._accounts.ended(turn, turn.req.output_ids, retain=False)
            self._settle()

    def released(self, req: Any) -> None:
        """Record that a request gave back its slots and its lock: it ended, or was retracted."""
        turn = self.turn_of(req)
        self.readings.released(req)
        if isinstance(req, StageRow):
            self._row_released(req)
        elif turn is not None:
            with contained("ending a turn"):
                if turn.withheld:
                    self._forgetter.pending.let_go([turn])
                if req.finished():
                    self._finish(turn)
        with contained("removing what was condemned"):
            self._settle()

    def _row_released(self, row: StageRow) -> None:
        if self._splicer is None:
            return
        try:
            self._splicer.row_released(row)
        except Exception:
            self._fail(row.leyline)

    def flushing(self) -> None:
        """Prepare for the tree's flush."""
        with contained("ending claims"):
            self.claims.keeper.lose_all("flushed")

    def removing(self, keys: array[int], start: int, cause: str) -> None:
        """Record that the cached part of a path after ``start`` is about to go, for any claims."""
        self.claims.removing(keys, start, cause)

    def flushed(self) -> None:
        """Record that the tree is empty."""
        self.registry.clear()
        self.publications.clear()
        self._forgetter.clear()

    # Matching and publishing.

    def match(self, turn: Turn, params: MatchPrefixParams) -> MatchResult:
        """Return a turn's longest cached prefix, under the map it runs under or may run under."""
        tokens, limit = params.key.token_ids, params.key.limit
        try:
            if turn.phase is Phase.NEW:
                return self._best_match(turn, self._glance(turn), tokens, limit)
            return self.cache.find(turn.keys(tokens), turn.space, limit)
        except Exception:
            if turn.phase is Phase.NEW:
                log.exception("a waiting prompt is looked for as if it had no history")
                turn.lineage = ()
            else:
                self._fail(turn)
        return self.cache.find(tokens, turn.space, limit)

    def _glance(self, turn: Turn) -> CheckedRequest:
        """Return the request while it waits: its sources aren't checked before it is admitted."""
        prompt = turn.req.origin_input_ids
        return CheckedRequest(prompt, turn.payload, None, turn.refusal, (), None)

    def _best_match(
        self, turn: Turn, checked: CheckedRequest, tokens: array[int], limit: int | None
    ) -> MatchResult:
        """Match under each map under which the prompt may be cached; exact KV is preferred."""
        limit = len(tokens) if limit is None else limit
        best = self.cache.find(tokens, turn.space, limit)
        turn.lineage = ()
        for lineage in self._rules.maps(checked):
            keys = fold_keys(tokens, lineage, turn.scope)
            clean = min(limit, self._rules.clean_length(checked, lineage))
            found = self.cache.find(keys, turn.space, clean)
            if found.device_prefix_len > best.device_prefix_len:
                best, turn.lineage = found, runs_before(lineage, found.device_prefix_len)
        return best

    def publishes(self, turn: Turn | None, req: Any, length: int) -> bool:
        """Prepare for the first ``length`` tokens of a request to become matchable.

        Returns:
            False if they must not: no forget would find KV that isn't noted.
        """
        if turn is not None and length <= turn.noted:
            return True
        tokens = (req.origin_input_ids + req.output_ids)[:length]
        if turn is None or turn.session is None:
            with contained("noting what nobody published"):
                space = Space(req.extra_key, req.cache_salt)
                self._publish((NOBODY, req.rid), Publication(tokens, (), space))
            return True
        noted = turn.noted
        with contained("noting what is published"):
            if turn.lineage and self.cache.is_condemned(turn.keys(tokens)):
                # It would be filed as the condemned KV of the same name.
                self._keep_out(req)
                return False
            self._note(turn, tokens)
            noted = length
        turn.noted = noted
        return noted == length

    def _note(self, turn: Turn, tokens: array[int]) -> None:
        session = turn.session
        if session is None:
            return
        self.ledger.label(session, [label.span for label in turn.spans])
        self._publish(session, Publication(turn.keys(tokens), turn.lineage, turn.space))

    def _publish(self, session: SessionKey, path: Publication) -> None:
        for old, length in self.publications.note(session, path):
            self._forgetter.remove(old, length)

    def _enter(self, turn: Turn) -> None:
        """Note what a turn's copies have read, as they are about to become matchable."""
        if turn.carried is None:
            return
        for scope, lineage in self.ledger.enter(turn.scope, turn.carried):
            # Nobody could say any more what this KV has read.
            for owner, path, start in self.publications.under(scope, {lineage: 0}):
                self._forgetter.remove(path, start)
                self.publications.cut(owner, path, start)

    def checkpointed(self, req: Any) -> None:
        """Record that a request's KV is in the tree, up to the node that it holds locked."""
        if isinstance(req, StageRow) and self._splicer is not None:
            with contained("taking over a computed gap"):
                self._splicer.row_computed(req)

    # Admission.

    def admit(self, turn: Turn, admit: Admit, room: Callable[[], int]) -> AddReqResult:
        """Admit a turn's request, or do the next step that it needs first.

        Args:
            admit: SGLang's own admission.
            room: tokens that admission has left.

        Returns:
            SGLang's result for its budget; ``CONTINUE`` also for a turn that has to wait.
        """
        began = time.perf_counter_ns()
        verdict = self._prepare(turn, admit, room)
        turn.spent_ns += time.perf_counter_ns() - began
        if verdict is not None:
            return verdict
        req = turn.req
        req.init_next_round_input(self.cache)
        result = admit(req)
        if turn.phase is Phase.READY:
            if req.lock is not None:
                turn.move(Phase.RUNNING)
                with contained("writing a receipt"):
                    self._admitted(turn)
            elif result is AddReqResult.NO_TOKEN:
                self._release(turn)
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
                self._ready(turn)
        except NoRoomError:
            self._fall_back(turn, Reason.SOURCE_EVICTED, _PRESSURE)
        except Exception:
            self._fail(turn)
        return None

    def _begin(self, turn: Turn, room: Callable[[], int]) -> bool:
        """Check a new turn and plan its edit; returns False if there is no room for it now."""
        prompt = turn.req.origin_input_ids
        checked = self._check(turn, prompt)
        if checked.forgets:
            self._withhold_session(turn)
        limit = len(prompt) - 1
        match = self._best_match(turn, checked, prompt, limit)
        turn.checked = checked
        turn.plan = plan_turn(len(prompt), match.device_prefix_len, (), (), sink=0)
        if checked.edit is None or self._splicer is None:
            self._ready(turn)
            return True
        try:
            self._splicer.begin(turn, checked, match, room)
        except NoRoomError:
            if turn.plan.prefilled > room():
                return False  # nor is there room for an ordinary prefill: it waits as it is
            raise
        return True

    def _check(self, turn: Turn, prompt: array[int]) -> CheckedRequest:
        try:
            return self._rules.check(prompt, turn.payload, turn.refusal)
        except Exception:
            log.exception("an edit could not be checked; the request runs as an ordinary prefill")
            refusal = EditRefusedError(Reason.TRANSFORM_FAILED, "the edit could not be checked")
            return CheckedRequest(prompt, turn.payload, None, refusal, (), None)

    def _ready(self, turn: Turn) -> None:
        """Forget, now that all copies are made: they may have used the forgotten KV."""
        if self._splicer is not None:
            self._splicer.release_sources(turn)
        turn.move(Phase.READY)
        checked = turn.checked
        if checked is not None and checked.forgets:
            self._forget(turn, checked)

    def _fall_back(self, turn: Turn, reason: Reason, detail: str) -> None:
        """Give a splice up: drop its copies, and make the request an ordinary prefill."""
        self._strip(turn, reason, detail)
        if turn.phase in {Phase.NEW, Phase.STAGING}:
            self._ready(turn)

    def _strip(self, turn: Turn, reason: Reason, detail: str) -> None:
        """Reduce a turn to its prompt."""
        made = 0
        if turn.staging is not None:
            made = turn.staging.cursor
            if turn.staging.row is not None:
                # It continues under keys that are no longer its turn's.
                self._keep_out(turn.staging.row)
        kept = turn.plan.prefix if turn.plan is not None else 0
        prompt = turn.req.origin_input_ids
        with contained("giving a splice up"):
            self._release(turn)
            if made > kept and turn.lineage:
                path = Publication(turn.keys(prompt), turn.lineage, turn.space)
                self._forgetter.remove(path, kept)
        turn.carried, turn.lineage = None, ()
        turn.checked = self._check(turn, prompt).refused(reason, detail)
        turn.plan = Plan(len(prompt), 0, (), ())

    def _fail(self, turn: Turn) -> None:
        """Handle an error of the engine's own: SGLang's loop must not end with it."""
        log.exception("a splice failed; the request runs as an ordinary prefill")
        self._fall_back(turn, Reason.TRANSFORM_FAILED, _FAILED)

    def _release(self, turn: Turn) -> None:
        if self._splicer is not None:
            self._splicer.release(turn)

    def give_way(self) -> bool:
        """Free the memory that waiting turns hold; returns False if they held nothing.

        A splice that gave way begins again, a few times at most.
        """
        gave = False
        for turn in tuple(self._turns.values()):
            if turn.staging is None or turn.staging.row is not None:
                continue
            self._release(turn)
            gave = True
            if turn.phase is not Phase.STAGING:
                continue
            turn.restarts += 1
            turn.carried, turn.plan = None, None
            turn.move(Phase.NEW)
            if turn.restarts > MAX_RESTARTS:
                turn.refusal = EditRefusedError(Reason.SOURCE_EVICTED, _PRESSURE)
        return gave

    def _admitted(self, turn: Turn) -> None:
        """Release the turn's lock, as the request holds its own, and report the reuse."""
        self._release(turn)
        self._accounts.admitted(turn)
        self.claims.admitted(turn)

    # Forgetting.

    def _forget_first(self, turn: Turn) -> None:
        """Forget for a request that may never be admitted."""
        if turn.phase is Phase.STAGING:
            self._fall_back(turn, Reason.REPREFILLED, "claims leave its copies too little room")
        elif turn.phase is Phase.NEW:
            self._withhold_session(turn)
            self._forget(turn, self._check(turn, turn.req.origin_input_ids))

    def _forget(self, turn: Turn, checked: CheckedRequest) -> None:
        try:
            self._remove_readers(turn, checked)
        except Exception:
            log.exception("a forget failed; nobody finds what may have read the spans")
            self._condemn(turn)

    def _remove_readers(self, turn: Turn, checked: CheckedRequest) -> None:
        session = turn.session
        assert session is not None  # noqa: S101 - only a payload demands forgetting
        reused = turn.staging.cursor if turn.staging is not None else 0
        if turn.plan is not None:
            reused = max(reused, turn.plan.prefix)
        prompt = checked.prompt
        found = Publication(turn.keys(prompt)[:reused], runs_before(turn.lineage, reused))
        done = self._forgetter.forget(
            session,
            checked.forgotten,
            spared=(Publication(prompt), found),
            ticket=turn.message_id,
        )
        turn.forgot = done.counts
        self._withhold_readers(turn, done)
        if turn.lineage and self.cache.is_condemned(turn.keys(prompt)):
            # KV that is computed now must not be filed as the condemned KV of the same name.
            fresh = self._rules.fresh_lineage(turn.message_id, turn.scope)
            turn.lineage = (*runs_before(turn.lineage, reused), LineageRun(reused, fresh))

    def _condemn(self, turn: Turn) -> None:
        """Condemn KV after a forget failed midway.

        Nothing that may have read the spans is found from here on, and it is removed as soon as
        possible.
        """
        self._strip(turn, Reason.TRANSFORM_FAILED, "what was to be forgotten is yet to be removed")
        for other in tuple(self._turns.values()):
            if other is not turn and other.scope == turn.scope:
                self._withhold(other, turn.message_id)
        session = turn.session
        if session is not None:
            with contained("condemning what a session published"):
                turn.forgot = self._forgetter.condemn(session, turn.message_id)

    def _withhold_session(self, turn: Turn) -> None:
        """Withhold KV of the session's other requests, which may have read what is being forgotten.

        Not that of its own other answers, which have its prompt.
        """
        prompt = turn.req.origin_input_ids
        for other in tuple(self._turns.values()):
            same = other.message_id == turn.message_id and other.req.origin_input_ids == prompt
            if other.session == turn.session and not same:
                self._withhold(other, turn.message_id)

    def _withhold_readers(self, turn: Turn, done: Forgotten) -> None:
        """Withhold KV of other sessions' requests that may use shared KV that has read it."""
        for other in tuple(self._turns.values()):
            if other is turn or other.phase is Phase.NEW:
                continue
            prompt = len(other.req.origin_input_ids)
            if self.ledger.read_by(done.struck, other.scope, other.lineage, other.carried, prompt):
                self._withhold(other, turn.message_id)

    def _withhold(self, turn: Turn, ticket: str) -> None:
        """Publish nothing that a turn computes, as it may have read forgotten spans."""
        turn.withheld = True
        self._keep_out(turn.req)
        if turn.receipt is not None:
            turn.receipt = msgspec.structs.replace(turn.receipt, turn="")
        if turn.phase is Phase.STAGING:
            self._fall_back(turn, Reason.REPREFILLED, "what it would copy was forgotten meanwhile")
        kv = turn.req.kv
        if kv.holds_kv:
            own = kv.kv_allocated_len - kv.cache_protected_len
            self._forgetter.pending.wait(ticket, turn, own)

    def _keep_out(self, req: Any) -> None:
        """Publish nothing that a request computes, and overwrite it when it ends."""
        req.skip_radix_cache_insert = True
        self._kept_out.add(req)

    def withholds(self, kv: Any) -> bool:
        """Return True if the slots behind a KV record must be overwritten."""
        return any(req.kv is kv for req in self._kept_out)

    def _settle(self) -> None:
        self._forgetter.settle()
        for ticket, counts in self._forgetter.progress().items():
            self._accounts.progressed(ticket, counts)

    # The end.

    def _finish(self, turn: Turn) -> None:
        """Retain an ended request as a source, and close its receipt."""
        req = turn.req
        self._turns.pop(req.rid, None)
        self._release(turn)
        ran = turn.phase is Phase.RUNNING
        turn.move(Phase.ENDED)
        if ran:
            aborted = isinstance(req.finished_reason, FINISH_ABORT)
            retain = not (aborted or turn.withheld or turn.private)
            source = self._accounts.ended(turn, req.output_ids_through_stop, retain=retain)
            with contained("moving claims"):
                self.claims.retained(turn, source)
