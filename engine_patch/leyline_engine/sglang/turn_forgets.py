"""Forgets that turns demand: when they are carried out, and which other turns they reach.

A turn forgets once all its copies are made, or given up: they may use KV that is being forgotten.
KV that other turns are computing meanwhile may have read it, and is withheld: it is not published,
and overwritten when they end.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Mapping

import msgspec

from leyline_engine.admit.rules import CheckedRequest, Rules
from leyline_engine.contract import LineageRun, Reason
from leyline_engine.proof.prover import Prover
from leyline_engine.proof.witness import Slots
from leyline_engine.records.ledger import SpanLedger
from leyline_engine.records.lineage import runs_before
from leyline_engine.records.publications import Publication
from leyline_engine.records.sources import SessionKey
from leyline_engine.scheduler.containment import contained
from leyline_engine.sglang.accounts import Accounts
from leyline_engine.sglang.fallback import Fallback
from leyline_engine.sglang.forgetting import Forgetter, Forgotten
from leyline_engine.sglang.indexing import TurnIndexer
from leyline_engine.sglang.publishing import KeptOut
from leyline_engine.sglang.radix import LeylineRadixCache
from leyline_engine.sglang.splicer import release_sources
from leyline_engine.sglang.turn import Phase, Turn

log = logging.getLogger(__name__)


class TurnForgets:
    """Forgets of one scheduler's turns.

    Args:
        cache: the tree.
        rules: names the lineage of KV that must not be filed as condemned KV.
        ledger: knows which lineages have read a span.
        forgetter: carries forgets out on the tree.
        fallback: gives up splices of what is forgotten.
        indexer: takes withheld prompts out of the index of content.
        kept_out: takes requests whose KV is withheld.
        accounts: reports the progress of forgets.
        turns: turns that wait or run, by request.
        prover: proves forgets that are to be proven.
    """

    def __init__(
        self,
        cache: LeylineRadixCache,
        rules: Rules,
        ledger: SpanLedger,
        *,
        forgetter: Forgetter,
        fallback: Fallback,
        indexer: TurnIndexer,
        kept_out: KeptOut,
        accounts: Accounts,
        turns: Mapping[str, Turn],
        prover: Prover,
    ) -> None:
        self._cache = cache
        self._rules = rules
        self._ledger = ledger
        self._forgetter = forgetter
        self._fallback = fallback
        self._indexer = indexer
        self._kept_out = kept_out
        self._accounts = accounts
        self._turns = turns
        self._prover = prover

    # Forgets of a turn.

    def ready(self, turn: Turn) -> None:
        """Make a turn READY, and forget what it demands: its copies are made, or given up."""
        release_sources(self._cache, turn)
        turn.move(Phase.READY)
        checked = turn.checked
        if checked is not None and checked.forgets:
            self._forget(turn, checked)

    def fall_back(self, turn: Turn, reason: Reason, detail: str) -> None:
        """Give a splice up: drop its copies, and make the request an ordinary prefill."""
        self._fallback.strip(turn, reason, detail)
        if turn.phase in {Phase.NEW, Phase.STAGING}:
            self.ready(turn)

    def forget_first(self, turn: Turn) -> None:
        """Forget for a request that may never be admitted."""
        if turn.phase is Phase.STAGING:
            self.fall_back(turn, Reason.REPREFILLED, "claims leave its copies too little room")
        elif turn.phase is Phase.NEW:
            self.withhold_session(turn)
            self._forget(turn, self._fallback.check(turn))

    def catch_up(self, turn: Turn) -> None:
        """Give a turn the present counts of its forget, which went on while it waited."""
        if turn.forgot is not None:
            turn.forgot = self._forgetter.counts(turn.message_id)

    def releasing(self, turn: Turn, slots: Slots, keys: array[int], start: int) -> None:
        """Record that a withheld turn's slots are about to be overwritten.

        Args:
            keys: its keys; those from ``start`` on have the slots.
        """
        tickets = self._forgetter.pending.tickets(turn)
        self._prover.overwriting(tickets, slots, keys, start)

    def ended(self, turn: Turn) -> None:
        """Record that a turn's request gave its slots back for good: a retracted one runs again."""
        if turn.withheld:
            if self._cache.empty_corpus is not None:
                self._cache.empty_corpus()  # it added to it while it ran
            self._forgetter.pending.let_go([turn])

    def retire(self, turn: Turn, claimed: Callable[[SessionKey], list[Publication]]) -> None:
        """Drop the turns that one retires which was just retained.

        Args:
            claimed: returns the paths of a session's claims.
        """
        payload, session = turn.payload, turn.session
        if payload is None or session is None or not payload.retire:
            return
        others = [each for each in self._turns.values() if each.session == session]
        spared = [
            Publication(each.keys(each.req.origin_input_ids), each.lineage, each.space)
            for each in others
        ]
        spared += claimed(session)
        with contained("freeing what no turn continues"):
            gone = [name for name in payload.retire if name != payload.turn]
            self._accounts.retired(self._forgetter.retire(session, gone, spared))

    def stepped(self) -> None:
        """Close forgets whose last slots requests have written to, in the last step."""
        with contained("closing forgets"):
            if self._forgetter.written():
                self.settle()

    def settle(self) -> None:
        """Remove condemned KV without holders, or begin to, and report the forgets' progress."""
        self._forgetter.settle()
        self._report()

    def work(self) -> bool:
        """Remove a portion of condemned KV; returns False if there is none without holders."""
        worked = self._forgetter.work()
        if worked:
            self._report()
        return worked

    def finish(self) -> None:
        """Remove all condemned KV without holders."""
        with contained("removing what was condemned"):
            self._forgetter.finish()
            self._report()

    def _report(self) -> None:
        forgets = self._forgetter.progress()
        for ticket, counts in forgets.items():
            self._accounts.progressed(ticket, counts)
        self._accounts.proved(self._prover.settled(forgets))

    def clear(self) -> None:
        """Record that the tree is empty."""
        self._forgetter.clear()

    # The reach of a forget.

    def _forget(self, turn: Turn, checked: CheckedRequest) -> None:
        try:
            self._remove_readers(turn, checked)
        except Exception:
            log.exception("a forget failed; nobody finds what may have read the spans")
            self._prover.give_up(turn.message_id, "the forget failed in the engine")
            self._condemn(turn)

    def _remove_readers(self, turn: Turn, checked: CheckedRequest) -> None:
        session = turn.session
        assert session is not None  # noqa: S101 - only a payload demands forgetting
        reused = turn.staging.cursor if turn.staging is not None else 0
        if turn.plan is not None:
            reused = max(reused, turn.plan.prefix)
        prompt = checked.prompt
        keys = turn.keys(prompt)[: self._cache.tree_keys.keys_of(reused)]
        found = Publication(keys, runs_before(turn.lineage, reused), turn.space)
        done = self._forgetter.forget(
            session,
            checked.forgotten,
            spared=(Publication(prompt, (), turn.space), found),
            ticket=turn.message_id,
        )
        turn.forgot, turn.rests = done.counts, done.long
        self._withhold_readers(turn, done)
        counts = self._forgetter.pending.counts(turn.message_id) or done.counts
        self._prover.forgot(turn.message_id, counts)
        if turn.lineage and self._cache.is_condemned(turn.keys(prompt)):
            # KV that is computed now must not be filed as the condemned KV of the same name.
            fresh = self._rules.fresh_lineage(turn.message_id, turn.scope)
            turn.lineage = (*runs_before(turn.lineage, reused), LineageRun(reused, fresh))

    def _condemn(self, turn: Turn) -> None:
        """Condemn KV after a forget failed midway.

        Nothing that may have read the spans is found from here on, and it is removed as soon as
        possible.
        """
        left = "what was to be forgotten is yet to be removed"
        self._fallback.strip(turn, Reason.TRANSFORM_FAILED, left)
        readers = self._ledger.borrowers(turn.scope)
        for other in tuple(self._turns.values()):
            if other is not turn and other.scope in readers:
                self._withhold(other, turn.message_id)
        session = turn.session
        if session is not None:
            with contained("condemning what a session published"):
                turn.forgot = self._forgetter.condemn(session, turn.message_id)

    def withhold_session(self, turn: Turn) -> None:
        """Withhold KV of the session's other requests, which may have read what is being forgotten.

        Not that of its own other answers, which have its prompt.
        """
        if turn.prove is not None and turn.session is not None:
            self._prover.expect(turn.message_id, turn.session, turn.prove)
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
            if self._ledger.read_by(done.struck, other.scope, other.lineage, other.carried, prompt):
                self._withhold(other, turn.message_id)

    def _withhold(self, turn: Turn, ticket: str) -> None:
        """Publish nothing that a turn computes, as it may have read forgotten spans."""
        turn.withheld = True
        self._kept_out.add(turn.req)
        # Slots that others sent as well stay in the cache: the session offers them no more.
        self._indexer.withheld(turn)
        if turn.receipt is not None:
            turn.receipt = msgspec.structs.replace(turn.receipt, turn="")
        if turn.phase is Phase.STAGING:
            self.fall_back(turn, Reason.REPREFILLED, "what it would copy was forgotten meanwhile")
        kv = turn.req.kv
        # One that waits will hold its prompt; the receipt stays open until it has given that back.
        own = len(turn.req.origin_input_ids)
        if kv.holds_kv:
            own = kv.kv_allocated_len - kv.cache_protected_len
        self._forgetter.pending.wait(ticket, turn, own)
