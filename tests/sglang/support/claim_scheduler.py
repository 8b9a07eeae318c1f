"""The scheduler kit with claims: commands and a clock, refusals as SGLang sends them, and what must
hold between the book, the shelf and the tree."""

from __future__ import annotations

from itertools import count
from random import Random
from typing import Any

import msgspec
from scheduler_kit import VOCABULARY, Running, Scheduler, source_of
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import FINISH_ABORT, NextBatchPlan, Req
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestOutcome
from sglang.srt.mem_cache.common import release_kv_cache

from leyline_engine.claims.limits import Limits
from leyline_engine.claims.runs import pages_of
from leyline_engine.contract import (
    Claim,
    ClaimCommand,
    ClaimKind,
    ClaimRefusal,
    ClaimReply,
    ClaimState,
    ClaimStatus,
    Directive,
    EditPayload,
    GetClaim,
    Predicate,
    ReleaseClaim,
    SourceRef,
    SubmitClaim,
    TurnRecord,
    apply_directives,
    token_array,
    token_digest,
)
from leyline_engine.server.claim_clock import ClaimMessage
from leyline_engine.sglang import plugin

_OUT_OF_MEMORY = FINISH_ABORT("out of memory")
WHOLE_POOL = Limits(share=1.0, engine_share=1.0)


def text(seed: object, length: int) -> list[int]:
    """Random tokens."""
    rng = Random(str(seed))
    return [rng.randrange(VOCABULARY) for _ in range(length)]


def opens(session: str, turn: str = "t1", *, tenant: str = "a", **fields: Any) -> EditPayload:
    """The payload of a turn that edits nothing."""
    return EditPayload(session=session, scope=tenant, turn=turn, **fields)


class ClaimScheduler(Scheduler):
    """Requests are queued and looked at again as the plugin's hooks have it.

    Args:
        capacity: slots of the pool; a claim may have them all.
    """

    def __init__(self, capacity: int = 200, *, limits: Limits = WHOLE_POOL, **options: Any) -> None:
        super().__init__(capacity, limits=limits, **options)
        self.now_ms = 0
        self.aborted: dict[str, AbortReq] = {}
        """The messages sent to clients of requests that ended outside a batch."""
        self._orders = count(1)
        self._pending_chunked_abort_req: Req | None = None

    @property
    def keeper(self) -> Any:
        return self.engine.claims.keeper

    # Claims.

    def send(self, command: ClaimCommand | None) -> ClaimReply:
        """Have a command carried out, or let only the time come."""
        written = "" if command is None else msgspec.json.encode(command).decode()
        message = ClaimMessage(next(self._orders), self.now_ms, written)
        return self.engine.claims.carry_out(message).reply

    def tick(self, milliseconds: int) -> None:
        """Time passes."""
        self.now_ms += milliseconds
        self.send(None)

    def try_claim(self, session: str, end: int, **terms: Any) -> ClaimReply:
        """Claim ``[start, end)`` of a session's turn, hard unless ``terms`` say otherwise."""
        source, start = terms.pop("source", "t1"), terms.pop("start", 0)
        span = Predicate(source, start, end, terms.pop("share", 1.0))
        given = {"id": "c", "tenant": "a", "kind": ClaimKind.HARD}
        return self.send(SubmitClaim(Claim(session=session, predicate=span, **(given | terms))))

    def claim(self, session: str, end: int, **terms: Any) -> ClaimStatus:
        """The same where nothing is wrong with it."""
        return _the_one(self.try_claim(session, end, **terms))

    def status(self, claim: str = "c", tenant: str = "a") -> ClaimStatus:
        return _the_one(self.send(GetClaim(tenant, claim)))

    def release(self, claim: str = "c", tenant: str = "a") -> ClaimStatus:
        return _the_one(self.send(ReleaseClaim(tenant, claim)))

    # What SGLang's scheduler does with those that are refused.

    @property
    def waiting_queue(self) -> list[Req]:
        return self.waiting

    @property
    def chunked_req(self) -> Req | None:
        return self.chunked

    @property
    def chunked_prefill_size(self) -> int | None:
        return self.chunk

    def queue(self, req: Req, *, first: bool = False) -> None:
        def append(_: object, each: Req) -> None:
            super(ClaimScheduler, self).queue(each, first=first)

        plugin._queue(append, self, req)

    def _choose(self) -> NextBatchPlan:
        self._end_chunked()
        return super()._choose()

    def _end_chunked(self) -> None:
        """End a prompt between two chunks as SGLang does."""
        req, self._pending_chunked_abort_req = self._pending_chunked_abort_req, None
        if req is None:
            return
        assert req is self.chunked
        reason = req.discard_output_reason
        req.finished_reason = reason
        self._release_aborted_request(req)
        release_kv_cache(req, self.cache, checkpoint=False)
        self.chunked = None
        self.send_abort_output(AbortReq(rid=req.rid, finished_reason=reason.to_json()), req)

    def _release_aborted_request(self, req: Req) -> None:
        self.cache.finish(req.cache_request_handle, CacheRequestOutcome.ABORT)

    def send_abort_output(self, abort_req: AbortReq, req: Req) -> None:
        assert req.rid not in self.aborted, "ended twice"
        self.aborted[req.rid] = abort_req

    def retract(self, running: Running) -> None:
        """The last one that runs isn't queued again: SGLang ends it."""
        if len(self.running) > 1:
            super().retract(running)
            return

        def retract_decode(_: object) -> tuple[list[Req], float, list[Req]]:
            self.running.remove(running)
            running.req.to_finish = _OUT_OF_MEMORY
            release_kv_cache(running.req, self.cache, checkpoint=False)
            running.req.reset_for_retract()
            return [], 1.0, [running.req]

        _, _, ended = plugin._retract(retract_decode, self)
        for req in ended:
            reason = req.to_finish.to_json()
            self.send_abort_output(AbortReq(rid=req.rid, finished_reason=reason), req)

    # What came of it.

    def refusal(self, req: Req) -> ClaimRefusal:
        """The reason of a request's refusal; its client and its receipt got it."""
        sent = self.aborted[req.rid].finished_reason
        assert sent is not None
        assert (sent["status_code"], sent["err_type"]) == (503, "refused_by_claim")
        turn = self.engine.turn_of(req)
        assert turn is not None
        record = self.sender.records[turn.message_id]
        assert record.finished
        assert record.receipt.refused is not None
        return record.receipt.refused

    def cached(self, tokens: Any) -> int:
        """The number of cached leading tokens; no recency changes."""
        return len(self.engine.claims.shelf.cached(token_array(tokens)))

    def edit(
        self, req: Req, session: str, turn: str, cuts: tuple[Directive, ...], source: str = "t1"
    ) -> tuple[Req, TurnRecord]:
        """Run a turn that edits an earlier one, with a token more.

        Args:
            req: the earlier turn's request.
            source: its name.
        """
        tokens = source_of(req)
        ref = SourceRef(source, len(tokens), token_digest(tokens))
        before = self.engine.turn_of(req)
        lineage = before.lineage if before is not None else ()
        payload = opens(session, turn, sources=(ref,), directives=cuts, lineage=lineage)
        done, record = self.serve([*apply_directives(tokens, cuts), 7], payload)
        assert record is not None
        return done, record

    # What must always hold.

    def check(self) -> None:
        super().check()
        self.check_claims()

    def check_claims(self) -> None:
        """Locks, ranks and names are those of live claims, and no claim lost anything unheard."""
        keeper, shelf = self.keeper, self.engine.claims.shelf
        live = {(s.claim.tenant, s.claim.id): s for s in keeper.book.live()}
        assert keeper.places.keys() == live.keys()
        locks = {k for k, s in live.items() if s.claim.hard and s.state is ClaimState.MATERIALIZED}
        assert shelf._locks.keys() == locks
        assert shelf._ranked.keys() == live.keys() - locks
        locked = self.locked_slots()
        assert len(locked) == keeper.book.protected_pages * self.page
        assert len(locked) + self.private() + self.allocator.available_size() <= self.capacity
        held = {page for key in live for page in pages_of(keeper.book.held(key))}
        assert len(keeper.names) == len(held)
        for key in live:
            assert not keeper._missing(key), f"{key} lost KV and wasn't told"
        if not (self.waiting or self.running or self.chunked):
            assert self.cache.protected_size() == len(locked)

    def locked_slots(self) -> set[int]:
        """Slots that claims lock."""
        locks = self.engine.claims.shelf._locks.values()
        nodes = (lock.node for held in locks for lock in held)
        paths = (self.cache.path_device_indices(node).tolist() for node in nodes)
        return {slot for path in paths for slot in path}


def _the_one(reply: ClaimReply) -> ClaimStatus:
    assert reply.problem is None, reply.problem
    (status,) = reply.claims
    return status
