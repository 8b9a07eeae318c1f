"""Random requests, edits, forgets and claims near the pool's limit, in SGLang's own tree.

Whatever the order: every slot is accounted for, the book counts the slots that are really locked,
no claim loses KV without notice, every request ends, and when all claims are released nothing is
left locked.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import pytest
from claim_scheduler import ClaimScheduler, opens, text
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from scheduler_kit import source_of
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req

from leyline_engine.contract import (
    ClaimKind,
    ClaimState,
    DemoteClaim,
    Directive,
    LineageRun,
    ProblemCode,
    ReleaseClaim,
    SourceRef,
    apply_directives,
    token_array,
    token_digest,
)
from leyline_engine.sglang.stage_row import StageRow

pytestmark = pytest.mark.usefixtures("server_args")

CAPACITY = 260
LONGEST = 150
CLAIMS = st.sampled_from(["c0", "c1", "c2", "c3"])
PLACES = st.integers(0, LONGEST)


@dataclass
class Session:
    """A proxy's knowledge of a conversation."""

    name: str
    tenant: str
    tokens: list[int] = field(default_factory=list)
    turn: str = ""
    """The newest turn, where it is retained."""
    lineage: tuple[LineageRun, ...] = ()
    req: Req | None = None
    sent: str = ""


class Contained(logging.Handler):
    """Keeps what the plugin logs of failures, which it doesn't raise."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(self.format(record))


class Claims(RuleBasedStateMachine):
    """Four sessions of two tenants, which share an opening."""

    sessions = st.integers(0, 3)
    page = 1
    scale = 1
    """Factor of all lengths, for pages of many tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = iter(range(10**6))
        self.known = [Session(f"s{i}", "ab"[i % 2]) for i in range(4)]
        self.requests: list[Req] = []
        self.revisions = 0
        self.failures = Contained()
        logging.getLogger("leyline_engine").addHandler(self.failures)

    @initialize(
        chunk=st.sampled_from([None, 24]),
        core=st.sampled_from(["rust", "python"]),
    )
    def start(self, chunk: int | None, core: str) -> None:
        """Every session has had a turn."""
        chunk = None if chunk is None else max(self.page, chunk * self.scale)
        capacity = CAPACITY * self.scale
        self.scheduler = ClaimScheduler(capacity, chunk=chunk, core=core, page=self.page)
        self.begin()

    def begin(self) -> None:
        for session in self.known:
            session.tokens, session.turn, session.lineage = self.opening(), "", ()
            self.send(session, [*self.opening(), *text(session.name, 45 * self.scale)], 2)
        self.scheduler.drain()
        self.collect()

    def opening(self) -> list[int]:
        return text("opening", 34 * self.scale)

    # Requests.

    def send(self, session: Session, prompt: list[int], decode: int, **fields: Any) -> None:
        """Submit a session's next turn."""
        number = next(self.numbers)
        payload = opens(session.name, f"t{number}", tenant=session.tenant, **fields)
        session.sent = f"m{number}"
        session.req = self.scheduler.submit(prompt, payload, decode=decode, message_id=session.sent)
        self.requests.append(session.req)

    def idle(self, number: int) -> Session | None:
        session = self.known[number]
        if session.req is not None:
            return None
        if len(session.tokens) > LONGEST * self.scale:
            session.tokens, session.turn, session.lineage = self.opening(), "", ()
        return session

    @rule(number=sessions, length=st.integers(1, 40), decode=st.integers(1, 5))
    def append(self, number: int, length: int, decode: int) -> None:
        """A turn that continues where the last one ended."""
        if session := self.idle(number):
            prompt = [*session.tokens, *text(next(self.numbers), length * self.scale)]
            self.send(session, prompt, decode, lineage=session.lineage)

    @rule(number=sessions, start=PLACES, length=st.integers(1, 8), new=st.integers(0, 3))
    def edit(self, number: int, start: int, length: int, new: int) -> None:
        """A turn that leaves something out or puts something else there."""
        session = self.idle(number)
        if session is None or not session.turn:
            return
        start = min(34 * self.scale + start % (30 * self.scale), len(session.tokens) - 1)
        end = min(start + length * self.scale, len(session.tokens))
        cuts = (Directive(start, end, tuple(text(new, new))),)
        source = token_array(session.tokens)
        ref = SourceRef(session.turn, len(source), token_digest(source))
        prompt = [*apply_directives(source, cuts), 7]
        self.send(session, prompt, 2, sources=(ref,), directives=cuts, lineage=session.lineage)

    @rule(number=sessions)
    def forget(self, number: int) -> None:
        """Forget everything that the session holds."""
        if session := self.idle(number):
            prompt = [*self.opening(), *text(next(self.numbers), 5)]
            self.send(session, prompt, 2, forget=("all",))
            session.lineage = ()

    @rule(number=sessions, length=st.integers(50, CAPACITY - 5))
    def press(self, number: int, length: int) -> None:
        """Somebody without an envelope needs room; the claims may be in the way."""
        # An empty pool holds it, by SGLang's arithmetic.
        most = self.scheduler.capacity - self.page - 3
        prompt = text(number, min(length * self.scale, most))
        self.requests.append(self.scheduler.submit(prompt, decode=2))

    @rule(number=st.integers(0, 20))
    def abort(self, number: int) -> None:
        """A client hangs up."""
        waiting = [r for r in self.scheduler.waiting if not isinstance(r, StageRow)]
        everyone = [*waiting, *(r.req for r in self.scheduler.running)]
        if everyone:
            req = everyone[number % len(everyone)]
            self.scheduler.abort(req)
            if req in waiting:
                self.requests.remove(req)
                for session in self.known:
                    session.req = None if session.req is req else session.req

    @rule(number=st.integers(0, 20))
    def retract(self, number: int) -> None:
        """Memory ran out in decoding."""
        running = self.scheduler.running
        if len(running) > 1:
            self.scheduler.retract(running[number % len(running)])

    @rule(rounds=st.integers(1, 6))
    def step(self, rounds: int) -> None:
        """The scheduler works."""
        for _ in range(rounds):
            self.scheduler.step()
        self.collect()

    @rule(really=st.integers(0, 9))
    def flush(self, really: int) -> None:
        """The operator empties the cache now and then, once nothing runs."""
        self.scheduler.drain()
        self.collect()
        if really == 9:
            self.scheduler.flush()
            self.begin()

    def collect(self) -> None:
        """Learn what a proxy learns of turns that ended."""
        for session in self.known:
            req = session.req
            if req is None or not (req.finished() or req.rid in self.scheduler.aborted):
                continue
            session.req = None
            record = self.scheduler.sender.records[session.sent]
            assert record.finished
            if req.rid in self.scheduler.aborted:
                sent = self.scheduler.aborted[req.rid].finished_reason
                assert sent is not None
                if sent.get("err_type") == "refused_by_claim":
                    refused = record.receipt.refused
                    assert refused is not None
                    assert refused.own or refused.others
                continue
            if isinstance(req.finished_reason, FINISH_ABORT):
                continue
            session.tokens = list(source_of(req))
            session.lineage = record.receipt.lineage
            session.turn = record.receipt.turn

    # Claims.

    @rule(
        number=sessions,
        claim=CLAIMS,
        span=st.tuples(PLACES, PLACES),
        terms=st.fixed_dictionaries(
            {
                "kind": st.sampled_from(list(ClaimKind)),
                "share": st.sampled_from([1.0, 1.0, 0.5, 0.1]),
                "priority": st.integers(0, 3),
                "ttl_s": st.sampled_from([None, 1, 3]),
                "write_no_admit": st.sampled_from([False, False, False, True]),
            }
        ),
    )
    def claim(self, number: int, claim: str, span: tuple[int, int], terms: dict[str, Any]) -> None:
        """A claim, or a later revision of one, over the newest turn."""
        session = self.known[number]
        while session.req is not None and not session.turn:
            self.step(1)
        span = span[0] * self.scale, span[1] * self.scale
        end = max(1, min(max(span) + self.scale, len(session.tokens) - 1))
        self.revisions += 1
        reply = self.scheduler.try_claim(
            session.name,
            end,
            id=claim,
            tenant=session.tenant,
            source=session.turn or "none",
            start=min(*span, end - 1),
            revision=self.revisions,
            **terms,
        )
        note(f"{reply.problem or reply.claims[0].state}")
        if reply.problem is not None:
            assert reply.problem.code in {ProblemCode.INVALID_CLAIM, ProblemCode.CLAIM_LIMIT}
            return
        status = reply.claims[0]
        assert status.state is not ClaimState.ACCEPTED
        assert 0 < status.required_tokens < end - min(*span, end - 1) + 2 * self.page

    @rule(claim=CLAIMS, tenant=st.sampled_from("ab"))
    def release(self, claim: str, tenant: str) -> None:
        """Its owner gives it up."""
        reply = self.scheduler.send(ReleaseClaim(tenant, claim))
        assert reply.problem is None or reply.problem.code is ProblemCode.UNKNOWN_CLAIM

    @rule(claim=CLAIMS, tenant=st.sampled_from("ab"))
    def demote(self, claim: str, tenant: str) -> None:
        """Its locks are given up."""
        self.scheduler.send(DemoteClaim(tenant, claim))

    @rule(milliseconds=st.sampled_from([300, 1000, 2500]))
    def tick(self, milliseconds: int) -> None:
        """Time passes."""
        self.scheduler.tick(milliseconds)

    # What must always hold.

    @invariant()
    def consistent(self) -> None:
        """See :meth:`claim_scheduler.ClaimScheduler.check`."""
        if hasattr(self, "scheduler"):
            self.scheduler.check()
            assert not self.failures.messages

    def teardown(self) -> None:
        """Everything ends, and everything is given back."""
        try:
            if hasattr(self, "scheduler"):
                self.end()
        finally:
            logging.getLogger("leyline_engine").removeHandler(self.failures)

    def end(self) -> None:
        # 80 prompts of up to 255 tokens in chunks of 24 take 880 rounds.
        self.scheduler.drain(rounds=2000)
        self.collect()
        for req in self.requests:
            assert req.finished() or req.rid in self.scheduler.aborted
        assert not self.scheduler.engine.turns
        for status in self.scheduler.keeper.book.live():
            self.scheduler.release(status.claim.id, status.claim.tenant)
        self.scheduler.serve([1, 2, 3])
        self.scheduler.check_idle()
        assert len(self.scheduler.keeper.names) == 0
        self.scheduler.flush()
        assert self.scheduler.allocator.available_size() == self.scheduler.capacity
        assert not self.failures.messages


class PagedClaims(Claims):
    """The same with pages of 16 tokens; most edges are within one."""

    page = 16


class LargePagedClaims(Claims):
    """The same with pages of 64 tokens, and texts that are longer in proportion."""

    page = 64
    scale = 4


def test_a_splice_whose_gap_is_computed_gives_way_to_the_prompt_before_it() -> None:
    """Two edits wait beside claims that leave room for one: both end, though the first can't begin
    while the second holds what it has made so far."""
    machine = Claims()
    machine.start(chunk=None, core="rust")
    machine.edit(number=1, start=0, length=4, new=3)
    machine.edit(number=2, start=136, length=3, new=3)
    scheduler = machine.scheduler
    for session, start, end in (("s0", 79, 80), ("s1", 79, 80), ("s3", 27, 80)):
        turn = next(known.turn for known in machine.known if known.name == session)
        tenant = "ab"[int(session[1]) % 2]
        scheduler.claim(session, end, id=session, tenant=tenant, source=turn, start=start)
    assert scheduler.keeper.book.protected_pages == 34 + 3 * 46
    machine.teardown()


_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


def test_claims_and_requests_in_any_order() -> None:
    """Books, locks, slots and receipts agree after every step, and everybody gets an end."""
    few = settings(max_examples=40, stateful_step_count=40, suppress_health_check=_SLOW)
    run_state_machine_as_test(Claims, settings=few)


def test_claims_on_pages_in_any_order() -> None:
    """The same with pages of 16 tokens, counted by SGLang's own allocator."""
    few = settings(max_examples=25, stateful_step_count=40, suppress_health_check=_SLOW)
    run_state_machine_as_test(PagedClaims, settings=few)


@pytest.mark.nightly
@pytest.mark.parametrize("machine", [Claims, PagedClaims, LargePagedClaims])
def test_claims_and_requests_in_many_orders(machine: type[Claims]) -> None:
    """The same, many more times and longer."""
    many = settings(max_examples=600, stateful_step_count=80, suppress_health_check=_SLOW)
    run_state_machine_as_test(machine, settings=many)
