"""Leyline in one SGLang scheduler: requests with envelopes, from the queue to their end.

A splice is applied once, when the scheduler would admit the request. Ranks of one replica see the
same requests in the same order and decide alike: nothing here reads a clock to decide, or chance.
On any error the request runs as an ordinary prefill, and its receipt gives the reason.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterable
from typing import Any, Protocol
from weakref import WeakValueDictionary

from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult

from leyline_engine.admit.content_reuse import ContentReuse
from leyline_engine.admit.edits import EditRefusedError, forgets
from leyline_engine.admit.rules import Rules
from leyline_engine.claims.limits import Limits
from leyline_engine.contract import (
    Capability,
    ClaimRefusal,
    LedgerAnswer,
    Reason,
    Recompute,
    decode_question,
)
from leyline_engine.energy import EnergyAccount
from leyline_engine.metrics import EngineMetrics
from leyline_engine.proof.prover import Prover
from leyline_engine.records.ledger import SpanLedger
from leyline_engine.records.ledger_reading import read_ledger
from leyline_engine.records.pending import PendingForgets
from leyline_engine.records.publications import Publications, Space
from leyline_engine.records.sources import SourceRegistry
from leyline_engine.reuse.fingerprints import MatcherKind
from leyline_engine.rows.pool import SplicePool
from leyline_engine.scheduler.containment import contained
from leyline_engine.server.channel import Sender
from leyline_engine.server.claim_desk import NO_ADMIT
from leyline_engine.sglang.accounts import Accounts
from leyline_engine.sglang.admission import Admission
from leyline_engine.sglang.census import open_census
from leyline_engine.sglang.claim_desk import SchedulerClaims
from leyline_engine.sglang.fallback import Fallback
from leyline_engine.sglang.forgetting import Forgetter
from leyline_engine.sglang.hints import take_hints
from leyline_engine.sglang.indexing import TurnIndexer
from leyline_engine.sglang.margin_gate import MarginGate
from leyline_engine.sglang.matching import Matcher
from leyline_engine.sglang.metrics import Readings
from leyline_engine.sglang.proving import SchedulerSite, agreed_proof, overwriting_watch
from leyline_engine.sglang.publishing import KeptOut, Publisher
from leyline_engine.sglang.radix import LeylineRadixCache
from leyline_engine.sglang.ranks import Replica
from leyline_engine.sglang.splicer import Splicer, planner, release
from leyline_engine.sglang.stage_row import StageRow
from leyline_engine.sglang.turn import Phase, Turn
from leyline_engine.sglang.turn_forgets import TurnForgets


class LedgerDesk:
    """Answers of one scheduler. It changes nothing, so that ranks stay alike.

    Args:
        pending: forgets that wait for running requests.
        replica: this one of the server's data-parallel replicas.
    """

    def __init__(
        self,
        registry: SourceRegistry,
        ledger: SpanLedger,
        pending: PendingForgets,
        replica: Replica,
    ) -> None:
        self._registry = registry
        self._ledger = ledger
        self._pending = pending
        self._replica = replica

    def answer(self, question: str) -> LedgerAnswer | None:
        """Return who holds or has read spans; None if the session is another replica's.

        Args:
            question: JSON of a :class:`~.contract.LedgerQuestion`.

        Raises:
            msgspec.DecodeError: it isn't one.
        """
        asked = decode_question(question.encode())
        session = (asked.scope, asked.session)
        if not self._replica.owns(session):
            return None
        return read_ledger(asked, self._ledger, self._registry, self._pending.of(session))


_PORTIONS = 2
"""Portions per step and worker, of a millisecond or less each."""


class Worker(Protocol):
    """Has work that can wait, which it does in order."""

    def work(self) -> bool:
        """Do a portion; returns False if there is none."""


class Chores:
    """The workers of one scheduler; none waits for another's work.

    Args:
        workers: those whose work is shared out.
    """

    def __init__(self, workers: Iterable[Worker]) -> None:
        self._workers = tuple(workers)

    def step(self) -> bool:
        """Let each worker do its portions for this step; returns False if none had any."""
        worked = False
        for worker in self._workers:
            with contained("catching up on bookkeeping"):
                for _ in range(_PORTIONS):
                    if not worker.work():
                        break
                    worked = True
        return worked


log = logging.getLogger(__name__)

MAX_COPIES = 64
"""Hits that a request may copy: each gap between two costs it a forward."""


class SchedulerEngine:
    """Registry, ledger and turns of one scheduler process; see :class:`.radix.Listener`.

    Args:
        cache: SGLang's tree, which reports to this engine.
        pool: rows of the KV pool; None if the measured facts don't let them be spliced.
        capability: capability of this engine.
        sender: takes receipts to the HTTP process.
        metrics: this scheduler's counters.
        secret: secret that signs envelopes; None takes them unsigned.
        salt: salt of lineages' names; the same on all ranks of the replica.
        min_copy: copies shorter than this, in tokens, are prefilled.
        stage_cost: tokens whose prefill takes as long as one more forward.
        matcher: the choice of fingerprints by which content is found.
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
        stage_cost: int = 0,
        recompute: Recompute = Recompute(),  # noqa: B008 - immutable
        matcher: MatcherKind = MatcherKind.WINNOW,
        agree: Callable[[bool], bool] = bool,
        limits: Limits | None = None,
        energy: EnergyAccount | None = None,
        replica: Replica = Replica(),  # noqa: B008 - immutable
    ) -> None:
        self.cache = cache
        self.capability = capability
        self._metrics = metrics
        self._secret = secret
        self._replica = replica
        self.registry = SourceRegistry(secret=secret)
        self.ledger = SpanLedger(defers=True)
        usable = int(cache.row_allocator.size)
        self.publications = Publications.of_tree(cache, usable)
        self.claims = SchedulerClaims(
            cache, self.registry, usable=usable, page_size=int(cache.page_size), limits=limits
        )
        lay = planner(cache, min_copy=min_copy, stage_cost=stage_cost)
        self._reuse = self._open_reuse(usable, salt=salt, matcher=matcher, lay=lay)
        self._indexer = TurnIndexer(cache, self._reuse)
        # Its request holds a turn; SGLang may drop a request without notice.
        self.turns: WeakValueDictionary[str, Turn] = WeakValueDictionary()
        self._kept_out = KeptOut()
        self._accounts = Accounts(self.registry, self.ledger, sender, metrics)
        rules = self._open_rules(pool, salt=salt, recompute=recompute)
        self._matcher = Matcher(cache, rules)
        self.prover = self._open_prover(pool, agree)
        forgetter = self._open_forgetter(erases=pool is not None)
        self.ledger_desk = LedgerDesk(self.registry, self.ledger, forgetter.pending, replica)
        self.publisher = Publisher(
            cache, self.ledger, self.publications, forgetter, kept_out=self._kept_out
        )
        self.margins = MarginGate(forgetter, kept_out=self._kept_out, agree=agree)
        fallback = Fallback(cache, rules, forgetter, kept_out=self._kept_out)
        self.forgets = self._open_forgets(rules, forgetter, fallback)
        self.chores = Chores((self.ledger.provenance, self._reuse.index, self.forgets))
        splicer = self._open_splicer(pool, rules, lay=lay, agree=agree)
        self.admission = self._open_admission(splicer, fallback)
        census = open_census(cache) if metrics.collects else None
        records = (metrics, self.registry, self.ledger, self.claims.keeper)
        self.readings = Readings(*records, census=census, energy=energy)
        cache.attach(self, pool, self.claims.shelf, census, self._reuse.index)
        self._accounts.announce(capability)

    def _open_reuse(self, usable: int, **options: Any) -> ContentReuse:
        options |= {"max_copies": MAX_COPIES, "defers": True}
        return ContentReuse(self.registry, self.ledger, usable, **options)

    def _open_rules(self, pool: SplicePool | None, **options: Any) -> Rules:
        recurrent = pool is not None and pool.states is not None
        return Rules(
            self.registry, self.ledger, splices=pool is not None, recurrent=recurrent, **options
        )

    def _open_prover(self, pool: SplicePool | None, agree: Callable[[bool], bool]) -> Prover:
        records = (self.registry, self.ledger, self.publications)
        self._site = SchedulerSite(self.cache, pool, records, self._reuse.index, self.turns)
        prover = Prover(self._site, agreed=agreed_proof(agree))
        if pool is not None:
            pool.erased = overwriting_watch(prover)
        return prover

    def _open_forgetter(self, *, erases: bool) -> Forgetter:
        return Forgetter(
            self.cache,
            self.registry,
            self.ledger,
            self.publications,
            erases=erases,
            told=self._metrics.forgot,
            witness=self.prover,
        )

    def _open_splicer(
        self, pool: SplicePool | None, rules: Rules, **options: Callable[..., Any]
    ) -> Splicer | None:
        if pool is None:
            return None
        copied = self._metrics.copied
        return Splicer(self.cache, pool, rules, self.publisher, copied=copied, **options)

    def _open_forgets(self, rules: Rules, forgetter: Forgetter, fallback: Fallback) -> TurnForgets:
        return TurnForgets(
            self.cache,
            rules,
            self.ledger,
            forgetter=forgetter,
            fallback=fallback,
            indexer=self._indexer,
            kept_out=self._kept_out,
            accounts=self._accounts,
            turns=self.turns,
            prover=self.prover,
        )

    def _open_admission(self, splicer: Splicer | None, fallback: Fallback) -> Admission:
        return Admission(
            self.cache,
            splicer,
            matcher=self._matcher,
            fallback=fallback,
            reuse=self._reuse,
            distrusted=self.margins.marks,
            forgets=self.forgets,
            turns=self.turns,
            admitted=self._admitted,
        )

    # Requests come and go.

    def receive(self, req: Any, *, beside: str = "") -> None:
        """Read a new request's envelope, if it has one; ``beside`` as :func:`.hints.take_hints`."""
        hints = self._replica.checked(take_hints(req, self._secret, beside=beside))
        if hints.nameless:
            self._kept_out.add(req)
        if hints.message_id is None:
            return
        refusal = None if hints.invalid is None else EditRefusedError(hints.invalid, hints.detail)
        turn = Turn(req, hints.message_id, hints.payload, refusal, hints.skipped, hints.reuse)
        turn.prove = hints.prove
        req.leyline = turn
        self.turns[req.rid] = turn
        if not self.claims.admits(turn):
            turn.private = req.skip_radix_cache_insert = True
            turn.reuse = None
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
            if turn is not None and forgets(turn.payload) and self.claims.bars(req, turn, cached):
                # The request may forget what is in its way, and no claim keeps that.
                self.forgets.forget_first(turn)
            refusal = self.claims.refuse_request(req, turn, cached)
            if refusal is not None:
                self._metrics.refused()
                if turn is not None:
                    self.forgets.catch_up(turn)
                    self._accounts.refused(turn, len(req.origin_input_ids), refusal, began=began)
        return refusal

    def refuse_running(self, req: Any) -> ClaimRefusal:
        """Return the refusal of a request that can't continue beside claims and other requests."""
        turn = self.turn_of(req)
        refusal = self.refuse(req, began=True)
        if refusal is None:
            refusal = self.claims.crowded(req, turn)
            self._metrics.refused()
            if turn is not None:
                self._accounts.refused(turn, len(req.origin_input_ids), refusal, began=True)
        return refusal

    def evicted(self, tokens: int) -> None:
        """Record an eviction."""
        self._metrics.evicted(tokens)

    def room(self) -> int:
        """Return the number of slots that are free or can be evicted."""
        free = self.cache.row_allocator.available_size()
        return int(free + self.cache.full_evictable_size())

    def cached_slots(self, req: Any) -> list[int]:
        """Return the slots of a waiting request's cached prefix."""
        turn = self.turn_of(req)
        tokens = req.origin_input_ids + req.output_ids
        limit = len(tokens) - 1
        if turn is None:
            found = self.cache.find(tokens, Space(req.extra_key, req.cache_salt), limit)
        else:
            found = self._matcher.match(turn, tokens, limit)
        path = self.cache.path_device_indices(found.last_device_node)
        return list(path[: found.device_prefix_len].tolist())

    def turn_of(self, req: Any) -> Turn | None:
        """Return the state of a request with an envelope, or of the turn that a row works for."""
        turn: Turn | None = getattr(req, "leyline", None)
        return turn

    def dropped(self, rid: str) -> None:
        """Record that a request won't run, or continue; one that holds KV is released next."""
        self.readings.dropped(rid)
        turn = self.turns.get(rid)
        if turn is None or turn.req.kv.holds_kv:
            return
        with contained("dropping a turn"):
            self.turns.pop(rid, None)
            release(self.cache, turn)
            turn.move(Phase.ENDED)
            self._accounts.ended(turn, turn.req.output_ids, retain=False)
            self._indexer.ended(turn, None)
            self.forgets.ended(turn)
            self.forgets.settle()

    def released(self, req: Any) -> None:
        """Record that a request gave back its slots and its lock: it ended, or was retracted."""
        turn = self.turn_of(req)
        self.readings.released(req)
        if isinstance(req, StageRow):
            self.admission.row_released(req)
        elif turn is not None:
            with contained("ending a turn"):
                if req.finished():
                    self.forgets.ended(turn)
                    self._finish(turn)
        with contained("removing what was condemned"):
            self.forgets.settle()

    def flushing(self) -> None:
        """Prepare for the tree's flush."""
        self.forgets.finish()
        with contained("ending claims"):
            self.claims.keeper.lose_all("flushed")

    def removing(self, keys: array[int], start: int, cause: str) -> None:
        """Record that the cached part of a path after ``start`` is about to go, for any claims."""
        self.claims.removing(keys, start, cause)

    def flushed(self) -> None:
        """Record that the tree is empty."""
        self.registry.clear()
        self.publications.clear()
        self.forgets.clear()
        self.margins.marks.clear()

    # Calls from the tree.

    def match(self, turn: Turn, params: MatchPrefixParams) -> MatchResult:
        """Return a turn's longest cached prefix, under the map it runs under or may run under."""
        tokens, limit = params.key.token_ids, params.key.limit
        try:
            return self._matcher.match(turn, tokens, limit)
        except Exception:
            if turn.phase is Phase.NEW:
                log.exception("a waiting prompt is looked for as if it had no history")
                turn.lineage = ()
            else:
                self.admission.fail(turn)
        return self.cache.find(tokens, turn.space, limit)

    def publishes(self, turn: Turn | None, req: Any, length: int) -> bool:
        """Prepare for tokens to become matchable; see :meth:`.publishing.Publisher.publishes`."""
        return self.publisher.publishes(turn, req, length)

    def checkpointed(self, req: Any) -> None:
        """Record that a request's KV is in the tree, up to the node that it holds locked."""
        turn = self.turn_of(req)
        if isinstance(req, StageRow):
            self.admission.row_computed(req)
        elif turn is not None:
            self._indexer.checkpointed(turn)

    def withholds(self, kv: Any) -> bool:
        """Return True if the slots of a KV record must be overwritten, which then begins."""
        if not self._kept_out.owns(kv):
            return False
        with contained("noting what is overwritten late"):
            for turn in [each for each in self.turns.values() if each.req.kv is kv]:
                self.forgets.releasing(turn, *self._site.own_rows(turn))
        return True

    def give_way(self) -> bool:
        """Free the memory that waiting turns hold; returns False if they held nothing."""
        return self.admission.give_way()

    def prefilled(self, batch: Any) -> None:
        """Judge the prefills that end with a batch, before SGLang acts on its result."""
        if batch.forward_mode.is_extend():
            with contained("judging margins"):
                self.margins.judge(batch.reqs)

    def _admitted(self, turn: Turn) -> None:
        """Report the reuse of a turn whose request runs from now on."""
        self.forgets.catch_up(turn)
        self._accounts.admitted(turn)
        if turn.gated:
            self.margins.marks.discard(turn.session)
        self.claims.admitted(turn)

    def _finish(self, turn: Turn) -> None:
        """Retain an ended request as a source, and close its receipt."""
        req = turn.req
        release(self.cache, self.turns.pop(req.rid, turn))
        ran = turn.phase is Phase.RUNNING
        turn.move(Phase.ENDED)
        if ran:
            aborted = isinstance(req.finished_reason, FINISH_ABORT)
            retain = not (aborted or turn.withheld or turn.private)
            source = self._accounts.ended(turn, req.output_ids_through_stop, retain=retain)
            with contained("moving claims"):
                self.claims.became_source(turn, source)
            self._indexer.ended(turn, source)
            if source is not None:
                self.forgets.retire(turn, self.claims.paths)
