"""Leyline in one vLLM scheduler: requests with envelopes, from their arrival to their end.

vLLM's scheduler decides for all workers, which carry its orders out; so nothing here is repeated on
ranks. On any error a request runs as an ordinary prefill, and its receipt gives the reason.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np

from leyline_engine.admit.edits import EditRefusedError, forgets
from leyline_engine.admit.hints import Hints
from leyline_engine.admit.plan import plan_turn
from leyline_engine.admit.rules import Rules
from leyline_engine.contract import Capability, ClaimRefusal, Reason, Recompute
from leyline_engine.metrics import EngineMetrics
from leyline_engine.records.ledger import SpanLedger
from leyline_engine.records.publications import (
    NOBODY,
    PER_SLOT,
    Publication,
    Publications,
)
from leyline_engine.records.sources import SourceRegistry, SourceTurn
from leyline_engine.scheduler.containment import contained
from leyline_engine.server.channel import Sender
from leyline_engine.server.claim_desk import NO_ADMIT, explain
from leyline_engine.vllm.accounts import Accounts
from leyline_engine.vllm.admission import Admission
from leyline_engine.vllm.block_keys import PathHasher, RequestKeys, space_of
from leyline_engine.vllm.blocks import UNPUBLISHED, BlockCache
from leyline_engine.vllm.claim_desk import OpenClaims, SchedulerClaims
from leyline_engine.vllm.control import ControlDesk
from leyline_engine.vllm.forgetting import Forgetter
from leyline_engine.vllm.orders import Orders, Slots, block_slots
from leyline_engine.vllm.retained import RetainedKeys
from leyline_engine.vllm.stepping import Stepper, uncount_cached
from leyline_engine.vllm.turn import Phase, Turn
from leyline_engine.vllm.turn_forgets import TurnForgets
from leyline_engine.vllm.withholding import Withholder


class Refuser:
    """Decides which requests of one scheduler end because of claims.

    Args:
        cache: the blocks.
        claims: what they hold.
        admission: looks prompts up.
        forget: carries out the forgets of turns.
        accounts: takes the reason into receipts.
        turns: turns that wait or run, by request.
    """

    def __init__(
        self,
        cache: BlockCache,
        claims: SchedulerClaims,
        admission: Admission,
        forget: TurnForgets,
        *,
        accounts: Accounts,
        metrics: EngineMetrics,
        turns: Mapping[str, Turn],
    ) -> None:
        self._cache = cache
        self._claims = claims
        self._admission = admission
        self._forgets = forget
        self._accounts = accounts
        self._metrics = metrics
        self._turns = turns

    def waiting(self, requests: Iterable[Any]) -> list[tuple[Any, str]]:
        """Return the waiting requests that can't run any more, with the reason; none if nothing has
        changed since the last look."""
        if not self._claims.recheck:
            return []
        self._claims.recheck = False
        found = [(each, self.refused(each)) for each in requests]
        return [(request, reason) for request, reason in found if reason]

    def refused(self, request: Any) -> str:
        """Return why a waiting request can't run before a claim ends; empty if it can."""
        refusal = None
        with contained("asking whether claims leave room"):
            refusal = self._refusal(request, self._turns.get(request.request_id))
        return "" if refusal is None else explain(refusal)

    def _refusal(self, request: Any, turn: Turn | None) -> ClaimRefusal | None:
        def found() -> list[Any]:
            return self._found(request, turn)

        if turn is not None and forgets(turn.payload) and self._claims.bars(request, turn, found):
            # The request may forget what is in its way, and no claim keeps that.
            self._admission.look_up(turn)
            self._forgets.carry_out(turn)
        refusal = self._claims.refuse_request(request, turn, found)
        if refusal is not None:
            self._metrics.refused()
            if turn is not None:
                began = request.num_output_tokens > 0
                self._accounts.refused(turn, len(turn.prompt), refusal, began=began)
        return refusal

    def _found(self, request: Any, turn: Turn | None) -> list[Any]:
        """Return the cached blocks of a waiting request's beginning."""
        within = (int(request.num_tokens) - 1) // self._cache.block
        if turn is not None and turn.phase is Phase.NEW and not turn.withheld:
            within = self._admission.look_up(turn)
        return self._cache.find(request.block_hashes, within)


class Arrivals:
    """Reads the envelopes of one scheduler's requests.

    Args:
        turns: takes the turns, by request.
        claims: may keep what a session computes out of the cache.
        read: reads a request's envelope.
        block: tokens per block.
    """

    def __init__(
        self,
        turns: dict[str, Turn],
        claims: SchedulerClaims,
        withholder: Withholder,
        read: Callable[[Any], Hints],
        block: int,
    ) -> None:
        self._turns = turns
        self._claims = claims
        self._withholder = withholder
        self._read = read
        self._block = block

    def receive(self, request: Any) -> None:
        """Read a new request's envelope, if it has one."""
        hints = self._read(request)
        if hints.message_id is None:
            if hints.nameless:
                self._withholder.stranger(request, 0, "")
            return
        refusal = None if hints.invalid is None else EditRefusedError(hints.invalid, hints.detail)
        turn = Turn(
            request,
            hints.message_id,
            RequestKeys(request, self._block),
            hints.payload,
            refusal,
            hints.skipped,
            prove=hints.prove,
            prompt=array("q", request.prompt_token_ids),
        )
        self._turns[request.request_id] = turn
        if hints.nameless:
            self._withholder.turn(turn, 0, "")
        elif not self._claims.admits(turn):
            self._withholder.turn(turn, 0, "")
            if turn.payload is not None and turn.payload.sources:
                turn.refusal = EditRefusedError(Reason.REFUSED_BY_CLAIM, NO_ADMIT)


log = logging.getLogger(__name__)

_UNGIVEN = "vLLM gave the request no room for its copies"
_FAILED = "the rows could not be copied"


class SchedulerEngine:
    """Registry, ledger and turns of one scheduler process.

    Args:
        cache: the blocks.
        hasher: finds the keys of paths that no request has any more.
        capability: capability of this engine.
        sender: takes receipts to the API server.
        metrics: this scheduler's counters.
        blocks_of: returns a request's blocks, in order, by its id.
        read_hints: reads the envelope of a request.
        secret: secret that signs envelopes; None takes them unsigned.
        salt: salt of lineages' names.
        min_copy: copies shorter than this, in tokens, are prefilled.
        stage_cost: tokens whose prefill takes as long as one more forward.
        open_claims: opens the claims on the blocks.
    """

    def __init__(
        self,
        cache: BlockCache,
        hasher: PathHasher,
        capability: Capability,
        sender: Sender,
        metrics: EngineMetrics,
        *,
        blocks_of: Callable[[str], list[Any]],
        read_hints: Callable[[Any, str | None], Hints],
        secret: str | None,
        salt: bytes,
        min_copy: int,
        stage_cost: int,
        bytes_per_token: int = 0,
        recompute: Recompute = Recompute(),  # noqa: B008 - immutable
        open_claims: OpenClaims = SchedulerClaims,
    ) -> None:
        self.cache = cache
        self.capability = capability
        self.registry = SourceRegistry(secret=secret)
        self.ledger = SpanLedger(defers=True)
        self.turns: dict[str, Turn] = {}
        self._blocks_of = blocks_of
        self._secret = secret
        self._read_hints = lambda request: read_hints(request, self._secret)
        self._metrics = metrics
        self._keys = RetainedKeys(hasher, cache.block)
        self.registry.dropped = lambda turn, _: self._keys.drop(turn)
        self.claims = open_claims(cache, self.registry, self._keys.of, capability)
        self.publications = Publications(
            max_tokens=max(1 << 20, PER_SLOT * cache.capacity), cached=self._cached_length
        )
        rules = Rules(
            self.registry, self.ledger, splices=capability.splices, salt=salt, recompute=recompute
        )

        def lay(*args: Any, **options: Any) -> Any:
            return plan_turn(*args, min_copy=min_copy, stage_cost=stage_cost, joins=True, **options)

        self._admission = Admission(cache, rules, self._keys, lay=lay)
        self._stepper = Stepper(
            self._admission,
            lambda request: [int(block.block_id) for block in blocks_of(request)],
            cache.block,
            copied=lambda rows: metrics.copied(rows * bytes_per_token),
        )
        self._accounts = Accounts(self.registry, self.ledger, sender, metrics)
        self._open_forgets(hasher)
        self._accounts.announce(capability)

    def _open_forgets(self, hasher: PathHasher) -> None:
        self._forgetter = Forgetter(
            self.cache,
            hasher,
            self.registry,
            self.ledger,
            self.publications,
            erases=self.capability.splices,
            told=self._metrics.forgot,
        )
        self._withholder = Withholder(self.cache, self._blocks_of)
        self._arrivals = Arrivals(
            self.turns, self.claims, self._withholder, self._read_hints, self.cache.block
        )
        self.forgets = TurnForgets(
            self.ledger,
            self._forgetter,
            self._withholder,
            self._admission,
            self._accounts,
            turns=self.turns,
        )
        self.refuser = Refuser(
            self.cache,
            self.claims,
            self._admission,
            self.forgets,
            accounts=self._accounts,
            metrics=self._metrics,
            turns=self.turns,
        )
        self._control = ControlDesk(self.claims, self.registry, self.ledger, self.cache.pending)

    def _cached_length(self, path: Publication) -> int:
        return len(path.keys)  # to look it up would mean to hash it again

    # Requests come.

    def receive(self, request: Any) -> None:
        """Read a new request's envelope, if it has one."""
        self._arrivals.receive(request)

    def look_up(self, request: Any) -> int | None:
        """Choose the lineage map of a waiting request, before vLLM looks it up.

        Returns:
            The most blocks that it may take from the cache; None leaves that to vLLM.
        """
        turn = self.turns.get(request.request_id)
        if turn is None or turn.phase is Phase.RUNNING or turn.withheld:
            return None
        try:
            if turn.phase is not Phase.NEW:
                self._admission.withdraw(turn)
            return self._timed(turn, self._admission.look_up)
        except Exception:
            log.exception("a waiting prompt is computed as if nothing of it were cached")
            return 0

    def matched(self, request: Any, prefix: int) -> int:
        """Plan a waiting request whose cached prefix vLLM has found.

        Returns:
            The number of tokens after the prefix that will be copied.
        """
        turn = self.turns.get(request.request_id)
        if turn is None or turn.phase is not Phase.NEW:
            return 0
        return self._timed(turn, lambda each: self._admission.plan(each, prefix))

    def _timed(self, turn: Turn, step: Callable[[Turn], int]) -> int:
        began = time.perf_counter_ns()
        try:
            return step(turn)
        finally:
            turn.spent_ns += time.perf_counter_ns() - began

    def allocated(self, request: Any, copied: int) -> None:
        """Record that vLLM gave a waiting request its blocks: it runs from now on.

        Args:
            copied: tokens after its prefix that vLLM takes for loaded.
        """
        turn = self.turns.get(request.request_id)
        if turn is None or turn.runs:
            return
        began = time.perf_counter_ns()
        try:
            self._begin(turn, copied)
        except Exception:
            log.exception("a splice failed; the request runs as an ordinary prefill")
            self._give_up(turn, copied, Reason.TRANSFORM_FAILED, _FAILED)
        if not turn.runs:
            turn.move(Phase.RUNNING)
        with contained("labelling a prompt"):
            if turn.session is not None:
                self.ledger.label(turn.session, [label.span for label in turn.spans])
            self.claims.admitted(turn)
        self.forgets.carry_out(turn)
        turn.spent_ns += time.perf_counter_ns() - began
        with contained("writing a receipt"):
            self._accounts.admitted(turn)

    def _begin(self, turn: Turn, copied: int) -> None:
        if turn.plan is None:
            self._admission.plan(turn, turn.prefix)
        staging = turn.staging
        if turn.phase is Phase.PLANNED and staging is not None and copied == staging.loaded:
            self._enter(turn)
            self._stepper.begin(turn, copied)
        elif turn.plan is not None and turn.plan.copies:
            self._give_up(turn, copied, Reason.SOURCE_EVICTED, _UNGIVEN)

    def _give_up(self, turn: Turn, copied: int, reason: Reason, detail: str) -> None:
        self._admission.give_up(turn, reason, detail)
        if copied:
            self._stepper.spoil(turn, turn.prefix, turn.prefix + copied)

    def _enter(self, turn: Turn) -> None:
        """Note what a turn's copies have read, as they are about to be found."""
        if turn.carried is None:
            return
        dropped = dict.fromkeys(self.ledger.enter(turn.scope, turn.carried), 0)
        # Nobody could say any more what this KV has read.
        gone = self.publications.under(dropped)
        self._forgetter.remove_all([(owner[0], path, start) for owner, path, start in gone])
        for owner, path, start in gone:
            self.publications.cut(owner, path, start)

    # Steps.

    def stepping(self, running: list[Any], requests: Collection[Any]) -> None:
        """Prepare for the choice of the next step's tokens.

        Args:
            requests: all that vLLM has, as they are from now on.
        """
        self.cache.begin_step()
        self.forgets.strangers = requests
        with contained("advancing staged turns"):
            self.ledger.provenance.work()  # in the step after, for which no first token waits
            for request in running:
                turn = self.turns.get(request.request_id)
                if turn is not None and turn.staging is not None:
                    self._stepper.advance(turn)

    def capped(self, request: Any, computed: int, tokens: int) -> int:
        """Return the size of a request's chunk: it ends where copied rows follow."""
        turn = self.turns.get(request.request_id)
        return tokens if turn is None else self._stepper.capped(turn, computed, tokens)

    def stepped(self, scheduled: dict[str, int]) -> Orders:
        """Return the orders of a step that vLLM has put together.

        Args:
            scheduled: its tokens by request.
        """
        self._stepper.scheduled(self.turns, scheduled)
        for turn in self.turns.values():
            if turn.phase is Phase.PLANNED:  # it got no blocks
                self._admission.withdraw(turn)
        erased = block_slots(self.cache.take_due(), self.cache.block)
        if self.cache.take_scrub():
            erased = np.concatenate([erased, *map(self._unwritten, self.forgets.strangers)])
        orders = self._stepper.take(erased)
        self.forgets.report()
        return orders

    def _unwritten(self, request: Any) -> Slots:
        """Return a request's slots that it hasn't written yet: another's rows may be there."""
        slots = block_slots(
            [int(block.block_id) for block in self._blocks_of(request.request_id)],
            self.cache.block,
        )
        return slots[self._written(request) :]

    def _written(self, request: Any) -> int:
        """Return how many tokens of a request have rows in front of the step's orders."""
        turn = self.turns.get(request.request_id)
        if turn is not None and turn.staging is not None and turn.staging.begun:
            return turn.staging.runs[0][0].dest
        return int(request.num_computed_tokens)

    @property
    def has_orders(self) -> bool:
        """True if rows wait to be overwritten, though no request may run."""
        return self.cache.has_due

    def control(self, message: str) -> str:
        """Carry out a command of the API server, or answer its question."""
        return self._control.answer(message)

    # Requests go.

    def preempting(self, request: Any) -> None:
        """Record that vLLM takes a running request's blocks; it will wait again."""
        turn = self.turns.get(request.request_id)
        self.claims.recheck |= bool(self.claims.keeper)
        with contained("preempting a turn"):
            self._withholder.releasing(request)
            self._hide_unwritten(request)
            self._note(request, turn)
        if turn is not None and (turn.phase is Phase.STAGING or turn.spoilt):
            self._admission.withdraw(turn)

    def _hide_unwritten(self, request: Any) -> None:
        """Remove blocks that vLLM has filed for a step from which it took the request again."""
        blocks = self._blocks_of(request.request_id)
        for block in blocks[self._written(request) // self.cache.block :]:
            self.cache.hide(block, UNPUBLISHED)
        self.cache.leaving(blocks)

    def failed(self) -> None:
        """Record that a worker could not copy rows: what has read them must not be found."""
        with contained("removing what has read rows that failed"):
            self.cache.hide_recent()

    def spoilt(self, request: Any) -> None:
        """Record that a request counted on such rows: it is computed again, without copies."""
        turn = self.turns.get(request.request_id)
        uncount_cached(request)
        if turn is not None and turn.carried is not None and turn.checked is not None:
            turn.checked = turn.checked.refused(Reason.TRANSFORM_FAILED, _FAILED)

    def ended(self, request: Any, *, answered: bool) -> None:
        """Record that a request ended; its blocks are given back next.

        Args:
            answered: True if it has run to an end that its client may see.
        """
        turn = self.turns.get(request.request_id)
        with contained("ending a request"):
            self._withholder.releasing(request)
            self._hide_unwritten(request)
            self._note(request, turn)
            self._withholder.ended(request)
        self.turns.pop(request.request_id, None)
        if turn is None:
            return
        with contained("ending a turn"):
            if turn.staging is not None and turn.staging.runs:
                answered = False
            self._admission.release(turn)
            turn.move(Phase.ENDED)
            source = self._accounts.ended(turn, retain=answered and not turn.withheld)
            if source is not None:
                self._retained(turn, source)

    def _retained(self, turn: Turn, source: SourceTurn) -> None:
        """Keep the keys of a turn that became a source, and free what it retires."""
        session = turn.session
        assert session is not None  # noqa: S101 - only a session's turn is retained
        if self.registry.get(session, source.turn) is source:
            self._keys.note(source, turn.keys.plain)
        self.claims.became_source(turn, source)
        if turn.payload is not None and turn.payload.retire:
            gone = [name for name in turn.payload.retire if name != turn.payload.turn]
            others = [each for each in self.turns.values() if each.session == session]
            spared = [each.path(each.prompt) for each in others]
            spared += self.claims.paths(session)
            self._accounts.retired(self._forgetter.retire(session, gone, spared))

    def _note(self, request: Any, turn: Turn | None) -> None:
        """Note what a request has published: a forget must find it."""
        tokens = array("q", request.all_token_ids[: request.num_computed_tokens])
        if turn is not None and turn.withheld:
            tokens = tokens[: turn.kept]
        if not len(tokens) or request.mm_features or request.prompt_embeds is not None:
            return
        if turn is None or turn.session is None:
            owner, path = (NOBODY, request.request_id), Publication(tokens, (), space_of(request))
        else:
            owner, path = turn.session, turn.path(tokens).cut(len(tokens))
        gone = self.publications.note(owner, path)
        self._forgetter.remove_all([(owner[0], old, length) for old, length in gone])

    def flushed(self) -> None:
        """Record that vLLM has emptied its prefix cache."""
        self.registry.clear()
        self._keys.clear()
        self.publications.clear()
        self._forgetter.clear()
